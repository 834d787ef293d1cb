// Dimensions of boxes: their order, and contiguous runs on both sides.
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

// More dimensions than a tensor can have whose elements can be counted in 64 bits, not counting
// those of extent 1.
inline constexpr std::size_t box_rank_max = 64;

// Joins `outer` with `inner` if its steps continue where those of `inner` end, on both sides.
// Returns true if it did.
[[nodiscard]] bool run_on(BoxDim& outer, const BoxDim& inner) noexcept;

// Joins neighbours that run on, outermost first. Returns how many dimensions are left at the front.
template <typename Dim>
[[nodiscard]] std::size_t join_neighbours(std::span<Dim> dims) {
  std::size_t kept = 0;
  for (const Dim inner : dims) {
    if (kept == 0 || !run_on(dims[kept - 1], inner)) dims[kept++] = inner;
  }
  return kept;
}

// Extents of 1 dropped, largest target stride first, neighbours joined.
void normalise(std::vector<BoxDim>& dims);

// Normalised dimensions without an allocation. Value type.
class BoxDims {
 public:
  // False: too many dimensions. Extents of 1 are dropped.
  [[nodiscard]] bool append(const BoxDim& dim) noexcept;
  [[nodiscard]] std::span<BoxDim> dims() noexcept { return {dims_.data(), count_}; }
  [[nodiscard]] std::span<const BoxDim> dims() const noexcept { return {dims_.data(), count_}; }
  // The dimensions of a checked box, after sort_by_source().
  [[nodiscard]] static BoxDims by_source(const Box& box) noexcept;
  void sort_by_target() noexcept;  // largest stride first, then what can be joined is joined
  void sort_by_source() noexcept;

 private:
  std::array<BoxDim, box_rank_max> dims_ = {};
  std::size_t count_ = 0;
};

// The innermost dimensions whose elements are contiguous on both sides.
struct InnerRun {
  std::uint64_t elements = 1;
  std::size_t outer_dims = 0;  // number of other dimensions
};
[[nodiscard]] InnerRun inner_run(std::span<const BoxDim> dims) noexcept;
// Returns the run that a reader of the source reads at once, over holes of at most `hole` elements,
// from the first element to the last. `dims` are sorted by source.
[[nodiscard]] InnerRun source_run(std::span<const BoxDim> dims, std::uint64_t hole_max) noexcept;

[[nodiscard]] bool is_empty(const Box& box) noexcept;
// Returns true if the box copies all `elements` of a tensor in their order.
[[nodiscard]] bool copies_all(const Box& box, std::uint64_t elements) noexcept;

// Returns a run of 4- or 6-bit elements that starts and ends at whole bytes as a run of bytes.
[[nodiscard]] std::optional<Box> as_bytes(const Box& box, unsigned bits);
// Returns true if a box consists of whole bytes on both sides, for elements of `bits` bits.
[[nodiscard]] bool moves_whole_bytes(const Box& box, unsigned bits);

// Strides of elements in C order; an extent of 0 counts as 1.
[[nodiscard]] std::vector<std::uint64_t> row_strides(const Shape& shape);

}  // namespace loadstone
