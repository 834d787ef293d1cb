// Tie checks of a saved plan, bound to a catalog.
#pragma once

#include <vector>

#include "plan/plan_json.h"

namespace loadstone {

// Finds the tensors of the checks by name and appends the checks to plan.tie_checks. Throws Error
// "plan.json" for an unknown name, and for tensors of two shapes.
void bind_tie_checks(const std::vector<SavedTieCheck>& checks, const Catalog& catalog, Plan& plan);

}  // namespace loadstone
