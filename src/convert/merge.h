// The values of models that become one.
#pragma once

#include <memory>
#include <vector>

#include "convert/values.h"

namespace loadstone {

// Returns the values of merged and decoded tensors of joined checkpoints; the other tensors of the
// first one stay as they are. Throws Error "plan.options" for options that do not go with the
// catalog.
[[nodiscard]] Values merged_values(const std::shared_ptr<const Catalog>& catalog,
                                   const ConvertOptions& options, std::vector<Finding>& findings);

}  // namespace loadstone
