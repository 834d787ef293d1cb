// Which tensors an output has, without any model: what rules and recipes make of the sources.
#pragma once

#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

// One recipe for each tensor of the output, in the order of the file. What stands in the way is
// added to `findings`.
[[nodiscard]] Recipes output_recipes(const Catalog& catalog, const ConvertOptions& options,
                                     std::vector<Finding>& findings);

}  // namespace loadstone
