// Blocks that are kept, if the output's format can store them. The engine treats them as bytes: a
// U8 target whose boxes copy whole blocks.
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

// Returns the format of a recipe's source blocks; nullopt for several formats, or values.
[[nodiscard]] std::optional<BlockFormat> source_blocks(const Catalog& catalog,
                                                       const TargetRecipe& recipe);
// Returns the block format in which a recipe's tensor can be copied without encoding it again;
// nullopt if a box would split a block. It is the source's format, or `mxfp4` if the source is
// codes with scales that form GGUF's MXFP4 blocks.
[[nodiscard]] std::optional<BlockFormat> blocks_to_keep(const Catalog& catalog,
                                                        const std::vector<Decoding>& decodings,
                                                        const TargetRecipe& recipe);

// Turns each recipe that is `wanted` and has blocks to keep into bytes. Others stay values.
void keep_blocks(const Catalog& catalog, const std::function<bool(const TargetRecipe&)>& wanted,
                 Recipes& recipes);

// Removes and returns the companions of blocks that are decoded, which are no longer needed.
[[nodiscard]] std::vector<std::uint32_t> drop_block_scales(const Catalog& catalog,
                                                           Recipes& recipes);

// Returns the targets of a plan that store codes of the source in blocks.
[[nodiscard]] std::vector<RepackedTensor> repacked_blocks(const Conversion& conversion);
// Returns errors for targets whose codes the files cannot store in this layout, if no values were
// requested.
[[nodiscard]] std::vector<Finding> check_numbers(const Plan& plan);

// The stored form of a target that is not encoded: a dtype, or the blocks that it keeps with the
// shape of their values.
struct StoredType {
  Encoding encoding;
  Shape shape;
};
[[nodiscard]] StoredType stored_type(const Conversion& conversion, const PlannedTarget& target);

// Adds the shapes of kept tensors whose rows are not whole blocks to the metadata, so that files
// store them folded.
void add_folded_shapes(Conversion& conversion);

}  // namespace loadstone
