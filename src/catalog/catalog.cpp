#include "loadstone/catalog.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/only_errors.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

Catalog::Catalog(std::string root, std::vector<Shard> shards, std::vector<TensorInfo> tensors,
                 std::map<std::string, MetadataValue> metadata, std::vector<Finding> findings,
                 Storage* storage, QuantizationClaim claim) try
    : root_(std::move(root)),
      shards_(std::move(shards)),
      tensors_(std::move(tensors)),
      metadata_(std::move(metadata)),
      findings_(std::move(findings)),
      storage_(storage),
      claim_(claim) {
  const auto in_file_order = [](const TensorInfo& a, const TensorInfo& b) {
    return std::tie(a.shard, a.offset_begin, a.offset_end) <
           std::tie(b.shard, b.offset_begin, b.offset_end);
  };
  if (!std::ranges::is_sorted(tensors_, in_file_order)) {
    std::ranges::stable_sort(tensors_, in_file_order);
  }
  index_.reserve(tensors_.size());
  for (std::uint32_t i = 0; i < tensors_.size(); ++i) {
    const TensorInfo& tensor = tensors_[i];
    // Byte ranges lie within files and do not overlap, so their sum fits.
    total_bytes_ += tensor.byte_count();
    const auto [found, is_new] = index_.emplace(tensor.name, i);
    if (is_new) continue;
    Where where;
    where.path = shards_[tensor.shard].path;
    where.tensor = tensor.name;
    where.field = "weight_map";
    where.found = "'" + shards_[tensors_[found->second].shard].path + "' has it too";
    where.expected = "one shard";
    where.byte_offset = tensor.offset_begin;
    throw Error("ix.duplicate", "two shards hold a tensor of this name", std::move(where));
  }
  sort_findings(findings_);
} catch (...) {
  throw_as_error();
}

Catalog::~Catalog() = default;

const QuantizedTensors& Catalog::quantized() const {
  return only_errors([&]() -> const QuantizedTensors& {
    std::call_once(quantized_once_, [&] {
      quantized_ = std::make_unique<const QuantizedTensors>(find_quantized_tensors(*this));
    });
    return *quantized_;
  });
}

Storage& Catalog::storage(Storage* other) const noexcept {
  if (other != nullptr) return *other;
  return storage_ != nullptr ? *storage_ : local_storage();
}

std::optional<std::uint32_t> Catalog::find(std::string_view name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) return std::nullopt;
  return found->second;
}

}  // namespace loadstone
