// Cuts a box down to the part that writes a given range of the target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "loadstone/recipe.h"

namespace loadstone {

// Sorts the dimensions for cut_box() by target stride, largest first, and drops extents of 1.
// Returns false if the box writes an element more than once.
[[nodiscard]] bool order_to_cut(Box& box);

// Appends the part of the box that writes the elements [begin, end) of its target, as boxes
// relative to `begin`. If the dimensions nest, as in views, there are at most three boxes per
// dimension. Otherwise the function stops early when there are more than `cut_max` boxes.
void cut_box(const Box& box, std::uint64_t begin, std::uint64_t end, std::vector<Box>& cut,
             std::size_t cut_max = SIZE_MAX);

}  // namespace loadstone
