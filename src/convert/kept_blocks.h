// Keeps GGUF blocks of the source if the output's format can store them. Each tensor that is kept
// becomes a U8 target whose boxes copy whole blocks as bytes.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"
#include "loadstone/recipe.h"

namespace loadstone {

class SeparateExperts;

// Returns the block format of all sources of a recipe; nullopt if they have several formats, or are
// not blocks.
[[nodiscard]] std::optional<BlockFormat> source_blocks(const Catalog& catalog,
                                                       const TargetRecipe& recipe);
// Returns the block format in which a recipe's tensor can be copied without being encoded again;
// nullopt if a box would split a block. The format is the source's, or `mxfp4` if the source has
// codes and scales that form GGUF's MXFP4 blocks.
[[nodiscard]] std::optional<BlockFormat> blocks_to_keep(const Catalog& catalog,
                                                        const std::vector<Decoding>& decodings,
                                                        const TargetRecipe& recipe);

// Changes each recipe that is `wanted` and has blocks to keep, so that it copies bytes. Other
// recipes keep yielding values.
void keep_blocks(const Catalog& catalog, const std::function<bool(const TargetRecipe&)>& wanted,
                 Recipes& recipes);

// Returns quantizations for targets whose values come from NVFP4, with which the output stores the
// same codes and scales.
[[nodiscard]] std::map<std::string, Quantization, std::less<>> keep_nvfp4(
    const std::shared_ptr<const Catalog>& catalog, const Recipes& recipes);
// Returns true if no encoding was requested, so that quantized targets keep the source's codes.
[[nodiscard]] bool keeps_source_codes(const Conversion& conversion);

// Removes the recipes of companions of blocks that are decoded, and returns these companions,
// because the output no longer needs them.
[[nodiscard]] std::vector<std::uint32_t> drop_block_scales(const Catalog& catalog,
                                                           Recipes& recipes);

// Returns the targets of a plan that store codes of the source in blocks.
[[nodiscard]] std::vector<RepackedTensor> repacked_blocks(const Conversion& conversion);
// Returns a finding for each target whose codes the files cannot store in their layout.
[[nodiscard]] std::vector<Finding> check_numbers(const Plan& plan, Severity severity,
                                                 SeparateExperts& separate);

// The stored form of a target that is not encoded: a dtype, or the blocks that it keeps with the
// shape of their values.
struct StoredType {
  Encoding encoding;
  Shape shape;
};
[[nodiscard]] StoredType stored_type(const Conversion& conversion, const PlannedTarget& target);

// Adds the shapes of kept tensors whose rows are not whole blocks to the metadata, because files
// store these tensors folded.
void add_folded_shapes(Conversion& conversion);

}  // namespace loadstone
