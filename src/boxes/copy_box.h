// Copies a strided N-d region between two places in memory, and casts it if the dtypes differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "boxes/dims.h"
#include "kernels/cast.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Copies the box whose first element is at `source` to `target`. `dims`: in any order, at most
// box_rank_max of them with an extent above 1. Elements of both sides must have whole bytes, and
// `cast` must be the cast for their dtypes. Source and target must not overlap. Returns the finite
// values that overflow the target's dtype. Thread-safe; accesses no other memory.
Overflow copy_box(std::span<const BoxDim> dims, const Cast& cast, const std::byte* source,
                  std::size_t source_bytes, std::byte* target, std::size_t target_bytes) noexcept;

}  // namespace loadstone
