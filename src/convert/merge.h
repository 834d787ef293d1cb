// Computes the values of merged models.
#pragma once

#include <memory>
#include <vector>

#include "convert/values.h"

namespace loadstone {

// Returns recipes for the merged and decoded tensors of joined checkpoints. Other tensors of the
// first checkpoint stay unchanged. Throws Error "plan.options" for options that do not fit the
// catalog.
[[nodiscard]] Values merged_values(const std::shared_ptr<const Catalog>& catalog,
                                   const ConvertOptions& options, std::vector<Finding>& findings);

}  // namespace loadstone
