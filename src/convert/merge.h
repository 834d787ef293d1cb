// The values of models that become one.
#pragma once

#include <memory>
#include <vector>

#include "convert/values.h"

namespace loadstone {

// Of all tensors of joined checkpoints that are merged or decoded; the others of the first stay as
// they are. Throws Error "plan.options" for options that do not go with the catalog.
[[nodiscard]] Values merged_values(const std::shared_ptr<const Catalog>& catalog,
                                   const ConvertOptions& options, std::vector<Finding>& findings);

}  // namespace loadstone
