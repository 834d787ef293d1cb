// Boxes of a whole tensor, cut to what they write into a slice of it.
#pragma once

#include <vector>

#include "boxes/view.h"
#include "loadstone/recipe.h"
#include "loadstone/shape.h"

namespace loadstone {

// Afterwards the slice is the boxes' target. A slice without elements keeps a box without elements
// for each source. The boxes must have passed check_boxes() for a target of this shape, and the
// slice must be inside it. A problem leaves them unchanged.
[[nodiscard]] std::optional<Problem> slice_boxes(std::vector<Box>& boxes, const Shape& whole,
                                                 const Slice& slice);

}  // namespace loadstone
