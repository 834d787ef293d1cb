// Blocks of numbers that a conversion keeps as they are, where the files that it writes hold them.
// To the engine they are bytes: a target of U8 whose boxes copy whole blocks.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/plan.h"
#include "loadstone/recipe.h"

namespace loadstone {

// The format of the blocks that a recipe is made of; nothing where there are several, or numbers.
[[nodiscard]] std::optional<BlockFormat> source_blocks(const Catalog& catalog,
                                                       const TargetRecipe& recipe);
// Whether the recipe leaves them whole.
[[nodiscard]] bool can_keep_blocks(const Catalog& catalog, const TargetRecipe& recipe);

// Makes bytes of each recipe that is made of blocks of one format, leaves them whole, and is
// `wanted`. Others stay numbers.
void keep_blocks(const Catalog& catalog, const std::function<bool(const std::string&)>& wanted,
                 Recipes& recipes);

// The form in which files hold a target that is not quantized on its way: a dtype, or the blocks
// that it keeps and the shape of their numbers.
struct PlainForm {
  Encoding encoding;
  Shape shape;
};
[[nodiscard]] PlainForm plain_form(const Conversion& conversion, const PlannedTarget& target);

}  // namespace loadstone
