// The layouts that conversions give to experts, whatever they are asked for: for those who look at
// an output and know its source alone.
#pragma once

#include <memory>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/recipe.h"

namespace loadstone {

// All values of a checkpoint, by the recipes of conversions that take experts apart, under either
// set of words, or join them. What is quantized is F32. A layout that fits nothing has the values
// as they are.
[[nodiscard]] std::vector<Recipes> expert_layouts(const std::shared_ptr<const Catalog>& catalog);

}  // namespace loadstone
