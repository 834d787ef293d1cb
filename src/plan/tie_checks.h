// Binds the tie checks of a saved plan to a catalog.
#pragma once

#include <cstddef>
#include <vector>

#include "loadstone/name_hash.h"
#include "plan/plan_json.h"

namespace loadstone {

// Finds the tensors of the checks by name in the plan's catalog and appends the checks to
// plan.tie_checks. Throws Error "plan.json" for an unknown name, and for two tensors of different
// shapes. `targets` maps the names of the plan's targets to their indices.
void bind_tie_checks(const std::vector<SavedTieCheck>& checks, const NameMap<std::size_t>& targets,
                     Plan& plan);

}  // namespace loadstone
