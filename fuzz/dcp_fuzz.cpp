// Any bytes as the metadata of a DCP checkpoint beside a file of it: refused with an Error, or a
// catalog whose tensors can be read.
#include <algorithm>
#include <string_view>
#include <vector>

#include "catalog/assembled_file.h"
#include "fuzz/catalog_fuzz.h"
#include "support/torch_file.h"

namespace {

using loadstone::fuzz::MemoryFile;

// Thread-safe: it never changes.
class DcpStorage final : public loadstone::Storage {
 public:
  explicit DcpStorage(std::span<const std::uint8_t> metadata)
      : metadata_(metadata),
        // An item of [2, 2] numbers in F32, twice.
        item_(loadstone::test::torch_bytes(loadstone::test::pickle::tensor())),
        items_(item_ + item_) {}

  [[nodiscard]] std::shared_ptr<loadstone::ByteSource> open(const std::string& path) override {
    if (path == "/m/.metadata") return std::make_shared<MemoryFile>(path, metadata_);
    if (path != "/m/__0_0.distcp" && path != "/m/__1_0.distcp") {
      throw loadstone::Error("io.not_found", "none", {.path = path});
    }
    return std::make_shared<MemoryFile>(
        path, std::span(reinterpret_cast<const std::uint8_t*>(items_.data()), items_.size()));
  }
  [[nodiscard]] loadstone::EntryKind kind(const std::string& path) override {
    return path == "/m" ? loadstone::EntryKind::folder : loadstone::EntryKind::file;
  }
  [[nodiscard]] std::vector<std::string> list(const std::string&) override { return {".metadata"}; }
  // A name that left the folder would be a defect, whatever it means.
  [[nodiscard]] std::string resolve(const std::string& path) override {
    if (path != "/m" && !path.starts_with("/m/")) std::abort();
    if (path.find("/../") != std::string::npos || path.ends_with("/..")) std::abort();
    return path;
  }

 private:
  std::span<const std::uint8_t> metadata_;
  std::string item_;
  std::string items_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  DcpStorage storage({data, size});
  try {
    const auto catalog = loadstone::open_checkpoint("/m", {.storage = &storage});
    const auto source = loadstone::open_shard(storage, *catalog, 0);
    for (const loadstone::TensorInfo& tensor : catalog->tensors()) {
      if (tensor.offset_begin > tensor.offset_end) std::abort();
      // No more than the files hold: no two items share bytes.
      if (tensor.byte_count() > 1 << 16) std::abort();
      std::vector<std::byte> bytes(tensor.byte_count());
      source->read(tensor.offset_begin, std::span(bytes));
    }
    if (to_json(*catalog).empty() || to_table(*catalog, true).empty()) std::abort();
  } catch (const loadstone::Error&) {
    return 0;
  }
  return 0;
}
