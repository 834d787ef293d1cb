#include "verify/receipt_header.h"

#include <fmt/format.h>

#include <string_view>

#include "base/text.h"
#include "formats/gguf_shapes.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

std::string place_text(std::uint64_t begin, std::uint64_t end) {
  return fmt::format("bytes {} to {}", begin, end);
}

// A folded GGUF tensor has the model's shape in the catalog, and the file's rows in the receipt.
bool is_folded(const Catalog& catalog, const TensorInfo& found, const Shape& shape) {
  return catalog.metadata().contains(std::string(gguf_shape_prefix) + found.name) &&
         found.shape.numel() == shape.numel();
}

// The first thing of the two that differs.
void compare_tensor(const Catalog& catalog, const TensorInfo& found, const ReceiptTensor& expected,
                    std::vector<Difference>& differences) {
  const Shape shape(expected.shape);
  if (found.encoding.name() != expected.encoding) {
    differences.push_back({expected.name, DifferenceKind::encoding,
                           std::string(found.encoding.name()), printable(expected.encoding)});
  } else if (found.shape != shape && !is_folded(catalog, found, shape)) {
    differences.push_back({expected.name, DifferenceKind::shape, found.shape.text(), shape.text()});
  } else if (found.offset_begin != expected.begin || found.offset_end != expected.end) {
    differences.push_back({expected.name, DifferenceKind::bytes,
                           place_text(found.offset_begin, found.offset_end),
                           place_text(expected.begin, expected.end)});
  }
}

}  // namespace

// The parts of a split GGUF are one catalog.
const Catalog& ReceiptHeaders::catalog_of(const std::string& path) {
  const auto known = catalogs_.find(path);
  if (known != catalogs_.end()) return *known->second;
  constexpr std::uint32_t any_rank = 8;  // more than any file that is written
  const auto catalog =
      open_checkpoint(path, {.allow_links = true, .gguf_rank_max = any_rank, .storage = &storage_});
  for (const Shard& shard : catalog->shards()) catalogs_.try_emplace(shard.path, catalog);
  return *catalogs_.try_emplace(path, catalog).first->second;
}

void ReceiptHeaders::compare(const ReceiptFile& file, const std::string& path, bool is_whole,
                             std::vector<Difference>& differences) {
  if (file.tensors.empty()) return;
  std::map<std::string_view, const TensorInfo*> found;
  const Catalog* catalog = nullptr;
  try {
    catalog = &catalog_of(path);
    const bool is_one = catalog->shards().size() == 1;
    for (const TensorInfo& tensor : catalog->tensors()) {
      if (is_one || catalog->shards()[tensor.shard].path == path) found[tensor.name] = &tensor;
    }
  } catch (const Error& error) {
    differences.push_back({file.path + " (header)", DifferenceKind::bytes, error.what(),
                           "a header with the tensors that the receipt lists"});
    return;
  }
  for (const ReceiptTensor& tensor : file.tensors) {
    const auto own = found.find(tensor.name);
    if (own == found.end()) {
      differences.push_back(
          {tensor.name, DifferenceKind::missing,
           fmt::format("no tensor of this name in the header of '{}'", printable(file.path)),
           "a tensor that the receipt lists once"});
      continue;
    }
    compare_tensor(*catalog, *own->second, tensor, differences);
    found.erase(own);
  }
  if (!is_whole) return;
  for (const auto& [name, tensor] : found) {
    differences.push_back({std::string(name), DifferenceKind::unexpected,
                           fmt::format("a tensor in the header of '{}'", printable(file.path)),
                           "nothing in the receipt"});
  }
}

}  // namespace loadstone
