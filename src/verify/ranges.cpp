#include "verify/ranges.h"

#include <algorithm>
#include <tuple>

namespace loadstone {

namespace {

// Returns the key of a group of tensors that can share ranges, because they divide the shard into
// the same units.
auto group_of(const TensorInfo& tensor) {
  const Encoding encoding = tensor.encoding;
  const auto code = encoding.is_dtype() ? static_cast<std::uint32_t>(encoding.dtype())
                                        : 256 + static_cast<std::uint32_t>(encoding.block_format());
  return std::tuple(tensor.shard, code, tensor.offset_begin % unit_bytes(encoding));
}

}  // namespace

DistinctRanges::DistinctRanges(const Catalog& catalog)
    : catalog_(catalog), spans_(catalog.tensors().size()) {
  const auto& tensors = catalog.tensors();
  std::vector<std::uint32_t> order;
  order.reserve(tensors.size());
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].byte_count() > 0) order.push_back(i);
  }
  std::ranges::stable_sort(order, {}, [&](std::uint32_t i) {
    return std::tuple_cat(group_of(tensors[i]), std::tuple(tensors[i].offset_begin));
  });
  for (auto at = order.begin(); at != order.end();) {
    const auto end = std::find_if(at, order.end(), [&](std::uint32_t i) {
      return group_of(tensors[i]) != group_of(tensors[*at]);
    });
    add_group({at, end});
    at = end;
  }
}

// Adds the ranges of a group, sorted by start. Each start and end of a tensor is the start or end
// of a range.
void DistinctRanges::add_group(std::span<const std::uint32_t> group) {
  const auto& tensors = catalog_.tensors();
  std::vector<std::uint64_t> cuts;
  for (const std::uint32_t i : group) {
    cuts.push_back(tensors[i].offset_begin);
    cuts.push_back(tensors[i].offset_end);
  }
  std::ranges::sort(cuts);
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  const std::size_t first = ranges_.size();
  std::vector<std::uint64_t> begins;  // offsets at which the new ranges begin
  std::size_t next = 0;
  std::uint32_t farthest = group.front();
  for (std::size_t c = 0; c + 1 < cuts.size(); ++c) {
    for (; next < group.size() && tensors[group[next]].offset_begin <= cuts[c]; ++next) {
      if (tensors[group[next]].offset_end > tensors[farthest].offset_end) farthest = group[next];
    }
    if (tensors[farthest].offset_end <= cuts[c]) continue;  // a hole
    const std::uint64_t origin = tensors[farthest].offset_begin;
    ranges_.push_back({farthest, cuts[c] - origin, cuts[c + 1] - origin});
    begins.push_back(cuts[c]);
    bytes_ += cuts[c + 1] - cuts[c];
  }
  const auto at = [&](std::uint64_t offset) {
    return first +
           static_cast<std::size_t>(std::ranges::lower_bound(begins, offset) - begins.begin());
  };
  for (const std::uint32_t i : group) {
    spans_[i] = {at(tensors[i].offset_begin), at(tensors[i].offset_end)};
  }
}

std::vector<ValueCounts> DistinctRanges::of_tensors(std::span<const ValueCounts> counts) const {
  // Sums of the counts of all ranges before an index.
  std::vector<ValueCounts> sums(counts.size() + 1);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    sums[i + 1] = sums[i];
    sums[i + 1] += counts[i];
  }
  std::vector<ValueCounts> of_tensors(spans_.size());
  for (std::size_t i = 0; i < spans_.size(); ++i) {
    of_tensors[i] = sums[spans_[i].end];
    of_tensors[i] -= sums[spans_[i].begin];
  }
  return of_tensors;
}

}  // namespace loadstone
