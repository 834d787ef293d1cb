#include "receipt/configs.h"

#include <memory>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "catalog/adapter_config.h"
#include "catalog/config_claim.h"
#include "catalog/open_file.h"
#include "catalog/paths.h"
#include "loadstone/error.h"
#include "receipt/file_digest.h"

namespace loadstone {

namespace {

// Opens a config; returns null if it cannot be read, because planning could not read it either.
std::shared_ptr<ByteSource> opened(const FileOpener& opener, const std::string& folder,
                                   std::string_view name) {
  try {
    return opener.open(join_path(folder, name), folder);
  } catch (const Error& error) {
    const std::string& code = error.code();
    if (code != "io.not_found" && code != "io.denied" && code != "ix.path_escape") throw;
    return nullptr;
  }
}

}  // namespace

ReceiptFile whole_file(DigestKind kind, std::string path, ByteSource& file) {
  ReceiptFile row = {.path = std::move(path), .bytes = file.identity().bytes};
  if (row.bytes > 0) row.header_ranges.push_back({0, row.bytes});
  row.header_digest = file_digest(kind, file, 0, row.header_ranges);
  return row;
}

void add_configs(Receipt& receipt, const Catalog& catalog, Storage& storage) {
  std::set<std::uint32_t> used;
  for (const ReceiptFile& file : receipt.sources) used.insert(file.checkpoint);
  for (const std::uint32_t number : used) {
    const Catalog& checkpoint =
        catalog.checkpoints().empty() ? catalog : *catalog.checkpoints().at(number);
    const QuantizationClaim& claim = checkpoint.quantization_claim();
    std::vector<std::string_view> names;
    if (!claim.digest.empty()) names.assign(claiming_files.begin(), claiming_files.end());
    if (number > 0) names.emplace_back(adapter_config_name);
    for (const std::string_view name : names) {
      const auto file = opened({storage, claim.follows_links}, checkpoint.root(), name);
      if (file == nullptr) continue;
      receipt.sources.push_back(whole_file(receipt.kind, std::string(name), *file));
      receipt.sources.back().checkpoint = number;
    }
  }
}

}  // namespace loadstone
