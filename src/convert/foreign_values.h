// Constants of recipes that were computed for another checkpoint than the one that is converted.
#pragma once

#include <memory>
#include <optional>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

// A warning that names these constants. Nothing if config.json and the sources that they were
// computed from are the same, or recipes have no digest of them.
[[nodiscard]] std::optional<Finding> foreign_values(const std::shared_ptr<const Catalog>& catalog,
                                                    const Recipes& recipes);

}  // namespace loadstone
