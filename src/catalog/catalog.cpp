#include "loadstone/catalog.h"

#include <algorithm>
#include <tuple>

#include "base/named.h"
#include "base/only_errors.h"
#include "base/refuse_option.h"
#include "loadstone/error.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

std::string_view name(FileFormat format) noexcept {
  return name_among({"safetensors", "gguf", "torch", "dcp"}, format);
}

Catalog::Catalog(std::string root, std::vector<Shard> shards, std::vector<TensorInfo> tensors,
                 Metadata metadata, std::vector<Finding> findings, Storage* storage,
                 QuantizationClaim claim,
                 std::vector<std::shared_ptr<const Assembly>> assemblies) try
    : root_(std::move(root)),
      shards_(std::move(shards)),
      tensors_(std::move(tensors)),
      metadata_(std::move(metadata)),
      findings_(std::move(findings)),
      storage_(storage),
      claim_(claim),
      assemblies_(std::move(assemblies)) {
  assemblies_.resize(shards_.size());
  headers_checked_ = std::vector<std::atomic<bool>>(shards_.size());
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
    // Byte ranges are inside files and disjoint, so their sum does not overflow.
    total_bytes_ += tensor.byte_count();
    const auto [found, is_new] = index_.emplace(tensor.name, i);
    if (is_new) continue;
    throw Error("ix.duplicate", "two shards contain a tensor with this name",
                {.path = shards_[tensor.shard].path,
                 .tensor = tensor.name,
                 .field = "weight_map",
                 .found = "'" + shards_[tensors_[found->second].shard].path + "' has it too",
                 .expected = "one shard",
                 .byte_offset = tensor.offset_begin});
  }
  sort_findings(findings_);
} catch (...) {
  throw_as_error();
}

Catalog::Catalog(std::vector<std::shared_ptr<const Catalog>> checkpoints) try
    : storage_(nullptr), checkpoints_(std::move(checkpoints)) {
  if (checkpoints_.empty()) refuse_option("checkpoints", "the list of checkpoints is empty");
  std::uint64_t tensors = 0;
  for (const auto& each : checkpoints_) {
    if (each == nullptr) refuse_option("checkpoints", "the catalog is null");
    if (!each->checkpoints().empty())
      refuse_option("checkpoints",
                    "a checkpoint that was joined from others cannot be joined again");
    if (&each->storage() != &checkpoints_.front()->storage()) {
      refuse_option("checkpoints", "the checkpoints to join use different storages");
    }
    tensors += each->tensors().size();
  }
  if (tensors >= UINT32_MAX) refuse_option("checkpoints", "too many tensors");
  const Catalog& first = *checkpoints_.front();
  root_ = first.root_;
  metadata_ = first.metadata_;
  storage_ = first.storage_;
  claim_ = first.claim_;
  tensors_.reserve(tensors);
  for (const auto& each : checkpoints_) {
    const auto shards_before = static_cast<std::uint32_t>(shards_.size());
    shards_.insert(shards_.end(), each->shards_.begin(), each->shards_.end());
    assemblies_.insert(assemblies_.end(), each->assemblies_.begin(), each->assemblies_.end());
    for (const TensorInfo& tensor : each->tensors_) {
      tensors_.push_back(tensor);
      tensors_.back().shard += shards_before;
    }
    findings_.insert(findings_.end(), each->findings_.begin(), each->findings_.end());
    total_bytes_ += each->total_bytes_;
  }
  headers_checked_ = std::vector<std::atomic<bool>>(shards_.size());
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

const std::shared_ptr<const Assembly>& Catalog::assembly(std::uint32_t shard) const noexcept {
  return assemblies_[shard];
}

std::optional<std::uint32_t> Catalog::find(std::string_view name, std::uint32_t checkpoint) const {
  if (!checkpoints_.empty()) {
    if (checkpoint >= checkpoints_.size()) return std::nullopt;
    auto found = checkpoints_[checkpoint]->find(name);
    if (found) *found += tensors_of(checkpoint).begin;
    return found;
  }
  const auto found = index_.find(name);
  if (found == index_.end() || checkpoint != 0) return std::nullopt;
  return found->second;
}

Catalog::Range Catalog::tensors_of(std::uint32_t checkpoint) const {
  if (checkpoints_.empty()) {
    const auto count = static_cast<std::uint32_t>(tensors_.size());
    return checkpoint == 0 ? Range{0, count} : Range{count, count};
  }
  Range range;
  for (std::uint32_t i = 0; i < checkpoints_.size() && i <= checkpoint; ++i) {
    range.begin = range.end;
    range.end += static_cast<std::uint32_t>(checkpoints_[i]->tensors().size());
  }
  return checkpoint < checkpoints_.size() ? range : Range{range.end, range.end};
}

}  // namespace loadstone
