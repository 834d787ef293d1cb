// Generates plans of random boxes, which are cut, transposed, expanded and cast.
#pragma once

#include <random>

#include "support/plan_builder.h"

namespace loadstone::testing {

// Returns targets over one or more shards. They depend only on the state of `random`.
[[nodiscard]] Plan random_plan(std::mt19937_64& random, PlanBuilder& builder);

}  // namespace loadstone::testing
