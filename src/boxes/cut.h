// A box cut to a range of what it writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "loadstone/recipe.h"

namespace loadstone {

// The dimensions as cut_box() wants them: ordered by target stride, largest first, without extents
// of 1. False: the box writes an element more than once.
[[nodiscard]] bool order_to_cut(Box& box);

// Appends the part of the box that writes the elements [begin, end) of its target, as boxes whose
// target begins there. Where dimensions nest, as those of views do, at most a whole and two rests
// for each of them are left over; where they do not, it ends early with more than `cut_max` boxes.
void cut_box(const Box& box, std::uint64_t begin, std::uint64_t end, std::vector<Box>& cut,
             std::size_t cut_max = SIZE_MAX);

}  // namespace loadstone
