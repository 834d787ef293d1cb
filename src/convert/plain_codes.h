// FP8 tensors to which no scale belongs: their codes are numbers as they are.
#pragma once

#include <cstdint>

#include "convert/choose.h"
#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/recipe.h"
#include "plan/decodings.h"

namespace loadstone {

// Returns whether the recipe copies from such tensors alone, and keeps their dtype.
[[nodiscard]] bool is_plain_fp8(const Catalog& catalog, const TargetRecipe& recipe);

// Returns whether there are integers or FP8 that could be codes of an unknown layout.
[[nodiscard]] bool may_hold_codes(const Catalog& catalog);

// Recipes of such tensors make BF16, which holds their numbers, so that they can be quantized.
void widen_plain_fp8(const Catalog& catalog, Recipes& recipes);
// Recipes that were not chosen get their own dtype again.
void restore_plain_fp8(const Catalog& catalog, const Choices& choices, Recipes& recipes);

}  // namespace loadstone
