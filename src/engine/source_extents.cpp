#include "engine/source_extents.h"

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <utility>

#include "boxes/sources.h"
#include "engine/box_read.h"

namespace loadstone {

namespace {

// One extent a source, in the order in which they are met. Not thread-safe.
class SourceExtents {
 public:
  void add(std::uint32_t source, std::uint64_t begin, std::uint64_t end) {
    const std::size_t place = place_of(source);
    if (place == extents_.size()) {
      extents_.push_back({.source = source, .begin = begin, .end = end});
      return;
    }
    SourceExtent& extent = extents_[place];
    extent.begin = std::min(extent.begin, begin);
    extent.end = std::max(extent.end, end);
  }

  [[nodiscard]] std::vector<SourceExtent> take() { return std::move(extents_); }

 private:
  // Most targets have one source or two: those are found without an index.
  static constexpr std::size_t unindexed_max = 8;

  // Index of the source's extent; their count if it has none yet.
  [[nodiscard]] std::size_t place_of(std::uint32_t source) {
    if (extents_.size() < unindexed_max) {
      const auto found = std::ranges::find(extents_, source, &SourceExtent::source);
      return static_cast<std::size_t>(found - extents_.begin());
    }
    for (std::size_t i = seen_.size(); i < extents_.size(); ++i) {
      seen_.emplace(extents_[i].source, i);
    }
    const auto known = seen_.find(source);
    return known == seen_.end() ? extents_.size() : known->second;
  }

  std::vector<SourceExtent> extents_;
  std::unordered_map<std::uint32_t, std::size_t> seen_;
};

}  // namespace

std::vector<SourceExtent> source_extents(const ValueSet& values, const Value& target) {
  SourceExtents extents;
  visit_boxes(target, [&](const Box& box, Dtype dtype) {
    const auto read = box_read(values, box, dtype);
    if (!read) return;
    visit_sources(values, *read, read->elements(), [&](std::uint32_t source, ByteRange bytes) {
      extents.add(source, bytes.begin, bytes.end);
    });
  });
  auto found = extents.take();
  if (!found.empty()) return found;
  // A tensor without elements has sources too, of which no byte is read.
  for (const std::uint32_t source : sources_of(target.boxes, values.decodings, target.merge)) {
    const std::uint64_t begin = values.tensors()[source].offset_begin;
    extents.add(source, begin, begin);
  }
  return extents.take();
}

}  // namespace loadstone
