#include "convert/write/output_sink.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "codec/block_grid.h"
#include "convert/lossless.h"
#include "engine/box_read.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// Returns the reciprocal that compressed-tensors stores. With the dialect "exact", no scale has an
// infinite reciprocal.
float reciprocal_of(float scale, const OutputTensor& tensor) {
  const float inverse = 1.0F / scale;
  if (std::isfinite(inverse) && inverse > 0) return inverse;
  throw Error(
      "q.scale_value",
      "the weight is so small that its scale has no finite inverse: use --mode exact, "
      "or exclude it (--exclude)",
      {.tensor = tensor.name, .found = fmt::format("1 / {}", scale), .expected = "a finite scale"});
}

// Replaces scales by their reciprocals. Returns false if values must stay equal and one of them
// changes.
bool invert(const OutputTensor& tensor, bool is_searched, std::span<std::byte> bytes) {
  bool are_exact = true;
  for (std::size_t at = 0; at + sizeof(float) <= bytes.size(); at += sizeof(float)) {
    float scale = 0;
    std::memcpy(&scale, bytes.data() + at, sizeof(scale));
    float reciprocal = reciprocal_of(scale, tensor);
    if (is_searched) {
      const auto same = same_divisor(scale);
      are_exact = are_exact && same;
      reciprocal = same.value_or(reciprocal);
    }
    std::memcpy(bytes.data() + at, &reciprocal, sizeof(reciprocal));
  }
  return are_exact;
}

// If a larger share of a source is cached, other programs use the source. Smaller shares come from
// headers and read-ahead.
constexpr double cached_share_max = 0.05;

std::uint64_t machine_memory_bytes() {
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  const long page_bytes = ::sysconf(_SC_PAGESIZE);
  if (pages <= 0 || page_bytes <= 0) return UINT64_MAX;
  return static_cast<std::uint64_t>(pages) * static_cast<std::uint64_t>(page_bytes);
}

bool releases_cache(const Conversion& conversion, PageCache choice) {
  if (choice != PageCache::automatic) return choice == PageCache::release;
  return conversion.bytes_to_read + conversion.bytes_to_write > machine_memory_bytes() / 2;
}

}  // namespace

CacheRelease::CacheRelease(const Conversion& conversion, const ValueSet& values,
                           const OpenShards& shards, PageCache wanted)
    : values_(values),
      shards_(shards),
      is_on_(releases_cache(conversion, wanted)),
      is_released_(shards.sources().size(), false) {
  for (std::size_t i = 0; is_on_ && i < is_released_.size(); ++i) {
    const auto& source = shards.sources()[i];
    const auto cached = source ? source->cached_share() : std::nullopt;
    is_released_[i] = cached && *cached <= cached_share_max;
  }
}

void CacheRelease::made(std::uint32_t target) const {
  if (!is_on_) return;
  for (const SourceExtent& extent : source_extents(values_, values_[target])) {
    const std::uint32_t shard = values_.tensors()[extent.source].shard;
    if (!is_released_[shard]) continue;
    shards_.sources()[shard]->release(extent.begin, extent.end - extent.begin);
  }
}

OutputSink::OutputSink(const Conversion& conversion, const ValueSet& values,
                       const std::vector<bool>& wanted, OutputFiles& output,
                       const CacheRelease& cache, FileReceipts* receipts)
    : conversion_(conversion),
      values_(values),
      output_(output),
      cache_(cache),
      receipts_(receipts),
      wanted_(wanted),
      places_(conversion.plan.targets.size()),
      targets_left_(conversion.files.size()) {
  for (std::uint32_t f = 0; f < conversion.files.size(); ++f) {
    if (!wanted[f]) continue;
    const OutputFile& file = conversion.files[f];
    const auto first = static_cast<std::ptrdiff_t>(tensors_.size());
    for (const OutputTensor& tensor : file.tensors) tensors_.push_back(&tensor);
    std::ranges::sort(tensors_.begin() + first, tensors_.end(), {},
                      [](const OutputTensor* each) { return std::pair(each->target, each->part); });
    for (auto i = static_cast<std::uint32_t>(first); i < tensors_.size(); ++i) {
      Place& place = places_[tensors_[i]->target];
      if (place.end == 0) {
        place = {f, i, i};
        ++targets_left_[f];
      }
      place.end = i + 1;
    }
    if (file.tensors.empty()) output.finish(f);
  }
}

RunReport OutputSink::make(std::span<const std::shared_ptr<ByteSource>> sources,
                           MemoryCount& memory, Observer* observer) {
  const GroupList all = groups();
  std::atomic<bool>* const stop = receipts_ != nullptr ? &receipts_->stop() : nullptr;
  const unsigned threads = conversion_.budget.threads;
  return run({.values = values_,
              .shards = sources,
              .budget = conversion_.budget,
              .groups = all,
              .sink = *this,
              .memory = memory,
              .observer = observer,
              .stop = stop,
              .refuses_casts = true},
             {threads, threads, threads});
}

void OutputSink::write(std::uint32_t target, std::size_t part, std::uint64_t offset,
                       std::span<std::byte> bytes) {
  const OutputTensor& tensor = *tensors_of(target)[part];
  const auto& quantization = conversion_.plan.targets[target].quantization;
  const bool is_searched = quantization && quantization->exact_first.value_or(false);
  if (tensor.is_inverted && !invert(tensor, is_searched, bytes)) {
    const std::lock_guard lock(mutex_);
    rounded_.insert(target);
  }
  write(places_[target].file, tensor, offset, bytes);
}

void OutputSink::compared(std::uint32_t target, const EncodingLoss& found) {
  EncodingLoss loss = found;
  const std::lock_guard lock(mutex_);
  if (loss.blocks > 0 && rounded_.contains(target)) {
    loss.exact_blocks = 0;
    loss.largest_error = std::max(loss.largest_error, inverse_error);
  }
  check_loss(conversion_, target, loss);
  if (receipts_ != nullptr) receipts_->note_loss(target, loss);
  losses_.emplace(target, loss);
}

void OutputSink::finish(std::uint32_t target) {
  cache_.made(target);
  const std::uint32_t file = places_[target].file;
  if (conversion_.plan.targets[target].quantization) {
    for (const OutputTensor* const tensor : tensors_of(target)) {
      if (tensor->part == OutputTensor::no_part) write(file, *tensor, 0, *tensor->constant);
    }
  }
  // Finish the file only now: a target may turn out to be invalid after its last byte.
  if (--targets_left_[file] == 0) output_.finish(file);
}

// Returns one group of targets per file, in the order of their sources.
GroupList OutputSink::groups() const {
  GroupList groups;
  for (std::uint32_t f = 0; f < conversion_.files.size(); ++f) {
    if (!wanted_[f]) continue;
    std::vector<std::uint32_t> targets;
    for (const OutputTensor& tensor : conversion_.files[f].tensors) {
      if (tensors_of(tensor.target).front() == &tensor) targets.push_back(tensor.target);
    }
    append_groups(values_, targets, groups);
  }
  return groups;
}

std::span<const OutputTensor* const> OutputSink::tensors_of(std::uint32_t target) const {
  const Place& place = places_[target];
  return std::span(tensors_).subspan(place.begin, place.end - place.begin);
}

void OutputSink::write(std::uint32_t file, const OutputTensor& tensor, std::uint64_t offset,
                       std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  if (receipts_ != nullptr) {
    const auto index = &tensor - conversion_.files[file].tensors.data();
    receipts_->wrote(file, static_cast<std::size_t>(index), offset, bytes);
  }
  output_.write(file, conversion_.files[file].header_bytes + tensor.begin + offset, bytes);
}

}  // namespace loadstone
