#include "convert/files.h"

#include "receipt/receipt_file.h"

namespace loadstone {

bool same_file(const FileStatus& a, const FileStatus& b) noexcept {
  return a.identity.device == b.identity.device && a.identity.inode == b.identity.inode;
}

bool same_file(WritableStorage& storage, const std::string& a, const std::string& b) {
  const auto left = storage.status(a);
  const auto right = storage.status(b);
  return left && right && same_file(*left, *right);
}

bool is_plain_folder(WritableStorage& storage, const std::string& path) {
  const auto status = storage.status(path);
  return status && status->kind == EntryKind::folder;
}

bool is_receipt_file(WritableStorage& storage, const std::string& path) {
  const auto begin =
      path.ends_with(receipt_file_name) ? storage.read_begin(path, 100) : std::nullopt;
  return begin && begin->find("loadstone-receipt") != std::string::npos;
}

}  // namespace loadstone
