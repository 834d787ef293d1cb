// Merges of joined checkpoints as recipes.
#pragma once

#include <memory>
#include <vector>

#include "convert/values.h"
#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"

namespace loadstone {

// Of all tensors that are merged or decoded; the others of the first checkpoint stay as they are.
// Obstacles are added to `findings`. Throws Error "plan.options" for options that do
// not go with the catalog.
[[nodiscard]] Values merged_values(const std::shared_ptr<const Catalog>& catalog,
                                   const ConvertOptions& options, std::vector<Finding>& findings);

}  // namespace loadstone
