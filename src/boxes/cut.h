// Restricts a box to a range of its target.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "loadstone/recipe.h"

namespace loadstone {

// The dimensions as cut_box() wants them: ordered by target stride, largest first, without extents
// of 1. False: the box writes an element more than once.
[[nodiscard]] bool order_to_cut(Box& box);

// Appends the part of the box that writes the elements [begin, end) of its target, as boxes
// relative to `begin`. If dimensions nest, as in views, there are at most three boxes per
// dimension; otherwise it stops early with more than `cut_max` boxes.
void cut_box(const Box& box, std::uint64_t begin, std::uint64_t end, std::vector<Box>& cut,
             std::size_t cut_max = SIZE_MAX);

}  // namespace loadstone
