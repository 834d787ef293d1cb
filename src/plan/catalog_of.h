#pragma once

#include "loadstone/plan.h"

namespace loadstone {

// Throws Error "usage" if the plan has no catalog, because nothing made it.
[[nodiscard]] const Catalog& catalog_of(const Plan& plan);

}  // namespace loadstone
