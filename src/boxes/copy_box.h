// A strided N-d region from one place in memory to another, cast where the dtypes differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "boxes/dims.h"
#include "kernels/cast.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Copies the box whose first element is at `source` to `target`. `dims` in any order, at most
// box_rank_max of them with an extent above 1. Both sides have whole-byte elements, and `cast` is
// that of their dtypes. Source and target must not overlap. Returns the finite numbers that are too
// large for the target. Thread-safe; touches nothing else.
Overflow copy_box(std::span<const BoxDim> dims, const Cast& cast, const std::byte* source,
                  std::size_t source_bytes, std::byte* target, std::size_t target_bytes) noexcept;

}  // namespace loadstone
