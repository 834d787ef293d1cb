// Sorts and joins the dimensions of boxes, and finds the runs that are contiguous on both sides.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "loadstone/dtype.h"
#include "loadstone/recipe.h"
#include "loadstone/shape.h"

namespace loadstone {

// Maximum number of dimensions with an extent above 1. It is sufficient, because a tensor with more
// such dimensions has more than 2^64 elements.
inline constexpr std::size_t box_rank_max = 64;

// Joins `inner` to `outer` if the steps of `outer` continue where those of `inner` end, on both
// sides. Returns true if the dimensions were joined.
[[nodiscard]] bool run_on(BoxDim& outer, const BoxDim& inner) noexcept;

// Joins neighbours with run_on(). `dims` are ordered outermost first. Returns the number of
// remaining dimensions, which are at the front.
template <typename Dim>
[[nodiscard]] std::size_t join_neighbours(std::span<Dim> dims) {
  std::size_t kept = 0;
  for (const Dim inner : dims) {
    if (kept == 0 || !run_on(dims[kept - 1], inner)) dims[kept++] = inner;
  }
  return kept;
}

// Drops extents of 1, sorts by target stride (largest first) and joins neighbours.
void normalise(std::vector<BoxDim>& dims);

// Normalised dimensions of a box, stored without an allocation. Value type.
class BoxDims {
 public:
  // Drops an extent of 1. Returns false if there are too many dimensions.
  [[nodiscard]] bool append(const BoxDim& dim) noexcept;
  [[nodiscard]] std::span<BoxDim> dims() noexcept { return {dims_.data(), count_}; }
  [[nodiscard]] std::span<const BoxDim> dims() const noexcept { return {dims_.data(), count_}; }
  // Returns the dimensions of a checked box, after sort_by_source().
  [[nodiscard]] static BoxDims by_source(const Box& box) noexcept;
  void sort_by_target() noexcept;  // largest stride first; then joins neighbours
  void sort_by_source() noexcept;

 private:
  std::array<BoxDim, box_rank_max> dims_ = {};
  std::size_t count_ = 0;
};

// The run that the innermost dimensions form, whose elements are contiguous on both sides.
struct InnerRun {
  std::uint64_t elements = 1;
  std::size_t outer_dims = 0;  // number of other dimensions
};
[[nodiscard]] InnerRun inner_run(std::span<const BoxDim> dims) noexcept;
// Returns the run that one read of the source covers, from the first element to the last, including
// gaps of at most `hole_max` elements. `dims` must be sorted by source.
[[nodiscard]] InnerRun source_run(std::span<const BoxDim> dims, std::uint64_t hole_max) noexcept;

[[nodiscard]] bool is_empty(const Box& box) noexcept;
// Returns true if the box copies all `elements` of a tensor in order.
[[nodiscard]] bool copies_all(const Box& box, std::uint64_t elements) noexcept;

// Converts a box of 4- or 6-bit elements to one of bytes. Returns nullopt unless the box is a
// single run that starts and ends at whole bytes.
[[nodiscard]] std::optional<Box> as_bytes(const Box& box, unsigned bits);
// Returns true if a box consists of whole bytes on both sides, for elements of `bits` bits.
[[nodiscard]] bool moves_whole_bytes(const Box& box, unsigned bits);

// Returns the strides in elements for C order; an extent of 0 counts as 1.
[[nodiscard]] std::vector<std::uint64_t> row_strides(const Shape& shape);

}  // namespace loadstone
