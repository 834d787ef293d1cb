// Cuts boxes of a whole tensor to a slice of it.
#pragma once

#include <vector>

#include "boxes/view.h"
#include "loadstone/recipe.h"
#include "loadstone/shape.h"

namespace loadstone {

// Replaces the boxes with boxes that write only the slice. A slice without elements keeps an empty
// box per source. The boxes must have passed check_boxes() for a target of shape `whole`, and the
// slice must be inside it. Leaves the boxes unchanged if it returns a problem.
[[nodiscard]] std::optional<Problem> slice_boxes(std::vector<Box>& boxes, const Shape& whole,
                                                 const Slice& slice);

}  // namespace loadstone
