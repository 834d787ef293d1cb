// Weights that an output holds transposed: those of Conv1D layers in bitsandbytes' encodings.
#pragma once

#include "loadstone/recipe.h"

namespace loadstone {

// Swap the dims of a matrix. Returns false and leaves the recipe unchanged if its values are merged
// or constant, or if a box does not consist of whole rows or parts of them.
[[nodiscard]] bool transpose_recipe(TargetRecipe& recipe);

}  // namespace loadstone
