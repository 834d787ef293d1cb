// Blocks of numbers that are kept as they are, where the files that are written hold them. To the
// engine they are bytes: a target of U8 whose boxes copy whole blocks.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"
#include "loadstone/recipe.h"

namespace loadstone {

// The format of the blocks that a recipe is made of; nothing where there are several, or numbers.
[[nodiscard]] std::optional<BlockFormat> source_blocks(const Catalog& catalog,
                                                       const TargetRecipe& recipe);
// The format that a recipe can keep, because it leaves blocks of it whole: those of the source, or
// codes whose numbers its boxes copy and that have blocks of their own in such files.
[[nodiscard]] std::optional<BlockFormat> blocks_to_keep(const Catalog& catalog,
                                                        const std::vector<Decoding>& decodings,
                                                        const TargetRecipe& recipe);

// Makes bytes of each recipe that is `wanted` and has blocks to keep. Others stay numbers.
void keep_blocks(const Catalog& catalog, const std::function<bool(const TargetRecipe&)>& wanted,
                 Recipes& recipes);

// Drops what belongs to blocks that are decoded, and returns it: their numbers have been multiplied
// with it.
[[nodiscard]] std::vector<std::uint32_t> drop_block_scales(const Catalog& catalog,
                                                           Recipes& recipes);

// The targets of a plan that hold codes of the source in blocks.
[[nodiscard]] std::vector<RepackedTensor> repacked_blocks(const Conversion& conversion);
// Errors for targets whose codes files do not hold as they lie, and that nobody asked to be
// numbers.
[[nodiscard]] std::vector<Finding> check_numbers(const Plan& plan);

// The stored form of a target that is not quantized on its way: a dtype, or the blocks that it
// keeps, and the shape of their numbers.
struct StoredType {
  Encoding encoding;
  Shape shape;
};
[[nodiscard]] StoredType stored_type(const Conversion& conversion, const PlannedTarget& target);

// Adds to the metadata the shapes of kept tensors whose rows are not whole blocks, so that files
// store them folded.
void add_folded_shapes(Conversion& conversion);

}  // namespace loadstone
