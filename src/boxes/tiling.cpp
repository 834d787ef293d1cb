// Algorithm: sorted by their first element, regions form groups with disjoint spans, and each group
// must fill its span. In a group of several regions, the widest stride is the length of a row.
// Every region is cut into rectangles of rows. Rows with the same regions are examined once, and
// the part inside a row is the same problem with smaller strides. Fused, stacked and interleaved
// tensors take one or two such steps. Regions that do not nest, or that take too much work, are
// painted into a bitmap. If the bitmap would be too large, the regions are rejected, so a positive
// result is always exact.
#include "boxes/tiling.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/ceil_div.h"
#include "boxes/dims.h"

namespace loadstone {

bool run_on(RegionDim& outer, const RegionDim& inner) noexcept {
  if (outer.stride != inner.extent * inner.stride) return false;
  outer = {outer.extent * inner.extent, inner.stride};
  return true;
}

namespace {

// Limit on the number of examined regions: a base, plus an amount for each region.
constexpr std::uint64_t work_base = std::uint64_t{1} << 20;
constexpr std::uint64_t work_per_region = 64;
constexpr unsigned depth_max = 128;
constexpr std::uint64_t bitmap_elements_max = std::uint64_t{1} << 28;

enum class Verdict : std::uint8_t { tiles, fails, unknown };

// Sorts dimensions by stride and joins neighbours. Returns false if the steps of a dimension reach
// into the steps of the next dimension.
bool nest(Region& region) {
  auto& dims = region.dims;
  std::erase_if(dims, [](const RegionDim& dim) { return dim.extent == 1; });
  std::ranges::sort(dims, std::greater{}, &RegionDim::stride);
  dims.resize(join_neighbours(std::span(dims)));
  std::uint64_t span = 0;
  for (std::size_t i = dims.size(); i-- > 0;) {
    if (dims[i].stride <= span) return false;
    span += (dims[i].extent - 1) * dims[i].stride;
  }
  return true;
}

// Returns the distance from the first to the last position.
std::uint64_t span_of(const std::vector<RegionDim>& dims, std::size_t from = 0) {
  std::uint64_t span = 0;
  for (std::size_t i = from; i < dims.size(); ++i) span += (dims[i].extent - 1) * dims[i].stride;
  return span;
}

// Positions that are the same in each of several rows.
struct Rows {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  Region inside;
};

class Tiler {
 public:
  explicit Tiler(std::size_t regions) : work_max_(work_base + work_per_region * regions) {}

  Verdict tile(std::vector<Region> regions, std::uint64_t length) {
    std::ranges::sort(regions, {}, &Region::offset);
    std::uint64_t filled = 0;
    for (std::size_t i = 0; i < regions.size();) {
      std::uint64_t end = regions[i].offset + span_of(regions[i].dims) + 1;
      std::size_t next = i + 1;
      while (next < regions.size() && regions[next].offset < end) {
        end = std::max(end, regions[next].offset + span_of(regions[next].dims) + 1);
        ++next;
      }
      work_ += next - i;
      if (work_ > work_max_) return Verdict::unknown;
      if (regions[i].offset != filled) return Verdict::fails;
      const Verdict verdict =
          next - i == 1 ? single(regions[i]) : group({regions.data() + i, next - i}, end - filled);
      if (verdict != Verdict::tiles) return verdict;
      filled = end;
      i = next;
    }
    return filled == length ? Verdict::tiles : Verdict::fails;
  }

 private:
  static Verdict single(const Region& region) {
    const bool is_run =
        region.dims.empty() || (region.dims.size() == 1 && region.dims[0].stride == 1);
    return is_run ? Verdict::tiles : Verdict::fails;
  }

  // Examines regions whose spans are connected and begin at the start of the group.
  Verdict group(std::span<const Region> regions, std::uint64_t length) {
    std::uint64_t row = 1;
    for (const Region& region : regions) {
      if (!region.dims.empty()) row = std::max(row, region.dims[0].stride);
    }
    if (row == 1) return Verdict::fails;  // runs that overlap
    const std::uint64_t base = regions[0].offset;
    std::vector<Rows> parts;
    for (const Region& region : regions) {
      if (!cut({region.offset - base, region.dims}, row, parts)) return Verdict::unknown;
    }
    return sweep(parts, row, length);
  }

  // Appends the region as rectangles of rows. Returns false if this takes too much work.
  bool cut(const Region& region, std::uint64_t row, std::vector<Rows>& parts) {
    if (++work_ > work_max_) return false;
    const std::uint64_t at = region.offset / row;
    const std::uint64_t in_row = region.offset % row;
    if (in_row + span_of(region.dims) < row) {
      parts.push_back({at, at + 1, {in_row, region.dims}});
      return true;
    }
    const RegionDim outer = region.dims[0];
    const std::vector<RegionDim> rest(region.dims.begin() + 1, region.dims.end());
    const std::uint64_t rest_span = span_of(rest);
    for (std::uint64_t i = 0; i < outer.extent;) {
      if (++work_ > work_max_) return false;
      const std::uint64_t position = region.offset + i * outer.stride;
      const std::uint64_t inside = position % row;
      if (inside + rest_span >= row) {  // a step crosses the end of a row
        if (!cut({position, rest}, row, parts)) return false;
        ++i;
        continue;
      }
      const std::uint64_t steps =
          std::min(outer.extent - i, (row - 1 - rest_span - inside) / outer.stride + 1);
      std::uint64_t rows = 1;
      if (row % outer.stride == 0 && steps == row / outer.stride) rows = (outer.extent - i) / steps;
      Region inner = {inside, rest};
      if (steps > 1) inner.dims.insert(inner.dims.begin(), {steps, outer.stride});
      parts.push_back({position / row, position / row + rows, std::move(inner)});
      i += rows * steps;
    }
    return true;
  }

  Verdict sweep(std::vector<Rows>& parts, std::uint64_t row, std::uint64_t length) {
    std::vector<std::uint64_t> bounds = {0, length / row, ceil_div(length, row)};
    for (const Rows& part : parts) {
      bounds.push_back(part.begin);
      bounds.push_back(part.end);
    }
    std::ranges::sort(bounds);
    bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
    std::ranges::sort(parts, {}, &Rows::begin);
    std::vector<const Rows*> active;
    std::size_t next = 0;
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
      std::erase_if(active, [&](const Rows* part) { return part->end <= bounds[i]; });
      while (next < parts.size() && parts[next].begin == bounds[i])
        active.push_back(&parts[next++]);
      work_ += active.size();
      if (work_ > work_max_) return Verdict::unknown;
      std::vector<Region> inside;
      inside.reserve(active.size());
      for (const Rows* part : active) {
        inside.push_back(part->inside);
        if (!nest(inside.back())) return Verdict::unknown;
      }
      const std::uint64_t row_length = std::min(row, length - bounds[i] * row);
      if (++depth_ > depth_max) return Verdict::unknown;
      const Verdict verdict = tile(std::move(inside), row_length);
      --depth_;
      if (verdict != Verdict::tiles) return verdict;
    }
    return Verdict::tiles;
  }

  std::uint64_t work_max_;
  std::uint64_t work_ = 0;
  unsigned depth_ = 0;
};

class Bitmap {
 public:
  explicit Bitmap(std::uint64_t elements) : painted_(elements, false) {}

  // Returns the first position that is painted a second time, or nullopt.
  std::optional<std::uint64_t> paint(const Region& region, std::size_t dim, std::uint64_t at) {
    if (dim == region.dims.size()) {
      if (painted_[at]) return at;
      painted_[at] = true;
      return std::nullopt;
    }
    for (std::uint64_t i = 0; i < region.dims[dim].extent; ++i) {
      const auto twice = paint(region, dim + 1, at + i * region.dims[dim].stride);
      if (twice) return twice;
    }
    return std::nullopt;
  }

 private:
  std::vector<bool> painted_;
};

}  // namespace

std::optional<std::string> tiling_defect(std::vector<Region> regions, std::uint64_t elements) {
  Verdict verdict = Verdict::tiles;
  for (Region& region : regions) {
    if (!nest(region)) verdict = Verdict::unknown;
  }
  if (verdict == Verdict::tiles) verdict = Tiler(regions.size()).tile(regions, elements);
  if (verdict == Verdict::tiles) return std::nullopt;
  if (elements > bitmap_elements_max) {
    if (verdict == Verdict::fails) return "the boxes write some elements twice and others never";
    return "the boxes are too complex to check";
  }
  Bitmap bitmap(elements);
  for (const Region& region : regions) {
    // The volumes add up to `elements`, so if nothing is painted twice, each element is painted
    // once.
    const auto twice = bitmap.paint(region, 0, region.offset);
    if (twice)
      return fmt::format("the boxes write element {} twice, so another element is never written",
                         *twice);
  }
  if (verdict == Verdict::fails) return "the boxes write some elements twice and others never";
  return std::nullopt;
}

}  // namespace loadstone
