// Plans of random boxes: cut, transposed, expanded and cast.
#pragma once

#include <random>

#include "support/plan_builder.h"

namespace loadstone::testing {

// Targets over one or more shards; deterministic per state of `random`.
[[nodiscard]] Plan random_plan(std::mt19937_64& random, PlanBuilder& builder);

}  // namespace loadstone::testing
