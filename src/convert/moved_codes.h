// Codes that a conversion moves as they are keep their scales where readers look for them.
#pragma once

#include <vector>

#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"

namespace loadstone {

// An error for each target that holds codes which readers of the output would take for something
// else: experts that are joined while their scales stay one by one, say, or a weight that was
// renamed without them. `repacked` have the components that readers look for.
[[nodiscard]] std::vector<Finding> check_moved_codes(const Plan& plan,
                                                     const std::vector<RepackedTensor>& repacked,
                                                     bool dequantizes);

// Returns true if a target gets codes of the source as they are, whatever their container.
[[nodiscard]] bool moves_codes(const Plan& plan);

}  // namespace loadstone
