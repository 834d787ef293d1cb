// Ties of a skeleton's targets.
#pragma once

#include <cstddef>
#include <vector>

#include "loadstone/skeleton.h"

namespace loadstone {

// For each target the index of its root, itself if it is not a tie. A tie of a tie has the root of
// that one. Names are unique. Throws Error "skeleton.json" for a tie of an unknown target, and for
// ties that lead back to themselves.
[[nodiscard]] std::vector<std::size_t> tie_roots(const std::vector<Target>& targets);

}  // namespace loadstone
