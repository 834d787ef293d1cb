// Compares the blocks of scales on both sides of a box.
#pragma once

#include "codec/block_grid.h"
#include "loadstone/recipe.h"
#include "loadstone/shape.h"

namespace loadstone {

// Returns true if each block of `to` in the target's part that a box writes is part of one block of
// `from`. Decides conservatively for boxes other than slices, stacks and transpositions.
[[nodiscard]] bool blocks_are_within(const Box& box, const Shape& source, const BlockGrid& from,
                                     const Shape& target, const BlockGrid& to) noexcept;

}  // namespace loadstone
