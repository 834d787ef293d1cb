#include "convert/output_sink.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "boxes/sources.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// compressed-tensors keeps the inverse of a scale. The dialect "exact" has none whose inverse is
// infinite.
void invert(const OutputTensor& tensor, std::span<std::byte> bytes) {
  for (std::size_t at = 0; at + sizeof(float) <= bytes.size(); at += sizeof(float)) {
    float scale = 0;
    std::memcpy(&scale, bytes.data() + at, sizeof(scale));
    const float inverse = 1.0F / scale;
    if (!std::isfinite(inverse) || !(inverse > 0)) {
      throw Error("q.scale_value",
                  "the weight is so small that its scale has no finite inverse: use --mode exact, "
                  "or --exclude it",
                  {.tensor = tensor.name,
                   .found = fmt::format("1 / {}", scale),
                   .expected = "a finite scale"});
    }
    std::memcpy(bytes.data() + at, &inverse, sizeof(inverse));
  }
}

}  // namespace

OutputSink::OutputSink(const Conversion& conversion, const ValueSet& values,
                       const std::vector<bool>& wanted, OutputFiles& output,
                       const CacheRelease& cache, ReceiptRecorder* recorder)
    : conversion_(conversion),
      values_(values),
      output_(output),
      cache_(cache),
      recorder_(recorder),
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

// File by file, and in a file in the order of the sources.
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

RunReport OutputSink::make(std::span<const std::shared_ptr<ByteSource>> sources,
                           MemoryCount& memory, Observer* observer) {
  const GroupList all = groups();
  const unsigned threads = conversion_.budget.threads;
  return run({.values = values_,
              .shards = sources,
              .budget = conversion_.budget,
              .groups = all,
              .sink = *this,
              .memory = memory,
              .observer = observer,
              .refuses_casts = true},
             {threads, threads, threads});
}

std::span<const OutputTensor* const> OutputSink::tensors_of(std::uint32_t target) const {
  const Place& place = places_[target];
  return std::span(tensors_).subspan(place.begin, place.end - place.begin);
}

void OutputSink::write(std::uint32_t file, const OutputTensor& tensor, std::uint64_t offset,
                       std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  if (recorder_ != nullptr) recorder_->wrote(file, tensor, offset, bytes);
  output_.write(file, conversion_.files[file].header_bytes + tensor.begin + offset, bytes);
}

// Parts come first among a target's tensors, in their order.
void OutputSink::write(std::uint32_t target, std::size_t part, std::uint64_t offset,
                       std::span<std::byte> bytes) {
  const OutputTensor& tensor = *tensors_of(target)[part];
  if (tensor.is_inverted) invert(tensor, bytes);
  write(places_[target].file, tensor, offset, bytes);
}

void OutputSink::finish(std::uint32_t target) {
  cache_.made(target);
  const std::uint32_t file = places_[target].file;
  if (conversion_.plan.targets[target].quantization) {
    for (const OutputTensor* const tensor : tensors_of(target)) {
      if (tensor->part == OutputTensor::no_part) write(file, *tensor, 0, *tensor->constant);
    }
  }
  // Not at the last byte: a target can still turn out wrong then.
  if (--targets_left_[file] == 0) output_.finish(file);
}

OpenShards open_needed(const Conversion& conversion, const std::vector<bool>& wanted,
                       Storage* storage) {
  const Plan& plan = conversion.plan;
  check_claims(*plan.catalog, plan.catalog->storage(storage));
  std::vector<bool> needed(plan.catalog->shards().size(), false);
  const bool shares = std::ranges::count(wanted, true) > 0 &&
                      std::ranges::any_of(plan.targets, [](const PlannedTarget& target) {
                        return target.quantization.has_value();
                      });
  for (std::size_t i = 0; i < conversion.files.size(); ++i) {
    if (!wanted[i] && !shares) continue;
    for (const OutputTensor& tensor : conversion.files[i].tensors) {
      const Recipe& recipe = plan.targets[tensor.target].recipe;
      mark_shards(sources_of(recipe.boxes, plan.decodings, recipe.merge.get()),
                  plan.catalog->tensors(), needed);
    }
  }
  return {*plan.catalog, storage, needed};
}

}  // namespace loadstone
