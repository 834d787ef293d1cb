#include "boxes/cut.h"

#include <algorithm>
#include <functional>

namespace loadstone {

namespace {

// Returns the number of steps from `start` that are below `bound`.
std::uint64_t steps_until(std::uint64_t bound, std::uint64_t start, const BoxDim& dim) {
  if (start >= bound) return 0;
  return std::min(dim.extent, (bound - start - 1) / dim.target_stride + 1);
}

// Cuts a box at the ends of a range.
class Cutter {
 public:
  Cutter(const Box& box, std::uint64_t begin, std::uint64_t end, std::vector<Box>& kept,
         std::size_t kept_max)
      : box_(box),
        begin_(begin),
        end_(end),
        kept_(kept),
        kept_max_(kept_max),
        spans_(box.dims.size() + 1, 0) {
    for (std::size_t i = box.dims.size(); i-- > 0;) {
      spans_[i] = spans_[i + 1] + (box.dims[i].extent - 1) * box.dims[i].target_stride;
    }
  }

  // Cuts the sub-box that has the dimensions from `level` on and begins at these offsets.
  void cut(std::size_t level, std::uint64_t source, std::uint64_t target) {
    const std::uint64_t last = target + spans_[level];
    if (last < begin_ || target >= end_ || kept_.size() > kept_max_) return;
    if (target >= begin_ && last < end_) {
      keep(level, box_.dims.size() == level ? 1 : box_.dims[level].extent, source, target);
      return;
    }
    const BoxDim& dim = box_.dims[level];
    const std::uint64_t inner = spans_[level + 1];
    // Steps [touched_begin, touched_end) overlap the range, and steps [whole_begin, whole_end) are
    // completely inside it.
    const std::uint64_t touched_begin = steps_until(begin_, target + inner, dim);
    const std::uint64_t touched_end = steps_until(end_, target, dim);
    const std::uint64_t whole_begin = std::min(steps_until(begin_, target, dim), touched_end);
    const std::uint64_t whole_end = std::max(steps_until(end_, target + inner, dim), whole_begin);
    const auto step = [&](std::uint64_t i) {
      cut(level + 1, source + i * dim.source_stride, target + i * dim.target_stride);
    };
    for (std::uint64_t i = touched_begin; i < whole_begin; ++i) step(i);
    if (whole_begin < whole_end) {
      keep(level, whole_end - whole_begin, source + whole_begin * dim.source_stride,
           target + whole_begin * dim.target_stride);
    }
    for (std::uint64_t i = whole_end; i < touched_end; ++i) step(i);
  }

 private:
  void keep(std::size_t level, std::uint64_t extent, std::uint64_t source, std::uint64_t target) {
    Box& box = kept_.emplace_back();
    box.source = box_.source;
    box.decoding = box_.decoding;
    box.source_offset = source;
    box.target_offset = target - begin_;
    box.dims.assign(box_.dims.begin() + static_cast<std::ptrdiff_t>(level), box_.dims.end());
    if (!box.dims.empty()) box.dims.front().extent = extent;
  }

  const Box& box_;
  std::uint64_t begin_;
  std::uint64_t end_;
  std::vector<Box>& kept_;
  std::size_t kept_max_;
  std::vector<std::uint64_t> spans_;  // for each level, distance from the first to the last element
};

}  // namespace

bool order_to_cut(Box& box) {
  std::erase_if(box.dims, [](const BoxDim& dim) { return dim.extent == 1; });
  std::ranges::stable_sort(box.dims, std::greater{}, &BoxDim::target_stride);
  return box.dims.empty() || box.dims.back().target_stride > 0;
}

void cut_box(const Box& box, std::uint64_t begin, std::uint64_t end, std::vector<Box>& cut,
             std::size_t cut_max) {
  Cutter(box, begin, end, cut, cut_max).cut(0, box.source_offset, box.target_offset);
}

}  // namespace loadstone
