// A strided N-d region from one place in memory to another, cast where the dtypes differ.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/cast.h"
#include "loadstone/recipe.h"

namespace loadstone {

// More dimensions than a tensor can have whose elements can be counted in 64 bits, not counting
// those of extent 1.
inline constexpr std::size_t box_rank_max = 64;

// Dimensions without those of extent 1, in the order given; neighbours that run on into each other
// on both sides are one. Value type.
class BoxDims {
 public:
  // False: too many dimensions.
  [[nodiscard]] bool append(const BoxDim& dim) noexcept;
  [[nodiscard]] std::span<BoxDim> dims() noexcept { return {dims_.data(), count_}; }
  [[nodiscard]] std::span<const BoxDim> dims() const noexcept { return {dims_.data(), count_}; }
  void sort_by_target() noexcept;  // largest stride first, then what can be joined is joined
  void sort_by_source() noexcept;

 private:
  void join() noexcept;

  std::array<BoxDim, box_rank_max> dims_ = {};
  std::size_t count_ = 0;
};

// Copies the box whose first element is at `source` to `target`. `dims` in any order, at most
// box_rank_max of them with an extent above 1. Both sides have whole-byte elements, and `cast` is
// that of their dtypes. Source and target must not overlap. Thread-safe; touches nothing else.
void copy_box(std::span<const BoxDim> dims, const Cast& cast, const std::byte* source,
              std::size_t source_bytes, std::byte* target, std::size_t target_bytes) noexcept;

}  // namespace loadstone
