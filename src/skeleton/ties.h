// Finds the root of each tied target of a skeleton.
#pragma once

#include <cstddef>
#include <vector>

#include "loadstone/skeleton.h"

namespace loadstone {

// Returns the index of each target's root. A target that is not tied is its own root. Chains of
// ties are followed to the end. Names are unique. Throws Error "skeleton.json" for a tie to an
// unknown target, and for cycles.
[[nodiscard]] std::vector<std::size_t> tie_roots(const std::vector<Target>& targets);

}  // namespace loadstone
