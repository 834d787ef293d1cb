// The stages of make_conversion(), in their order.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "convert/values.h"
#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Which tensors an output has, without any model: what rules and recipes make of the sources. There
// is a recipe for each, in the file's order. Obstacles are added to `findings`.
[[nodiscard]] Values output_recipes(const std::shared_ptr<const Catalog>& catalog,
                                    const ConvertOptions& options, bool is_decoded,
                                    std::vector<Finding>& findings);

// ---- blocks of numbers that are kept as they are, where the files that are written hold them
//
// To the engine they are bytes: a target of U8 whose boxes copy whole blocks.

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

// How files store a target that is not quantized on its way: a dtype, or the blocks that it keeps
// and the shape of their numbers.
struct StoredType {
  Encoding encoding;
  Shape shape;
};
[[nodiscard]] StoredType stored_type(const Conversion& conversion, const PlannedTarget& target);

// Adds to the metadata the shapes of kept tensors whose rows are not whole blocks, so that files
// store them folded.
void add_folded_shapes(Conversion& conversion);

// ---- codes

// Returns true if a target gets codes of the source as they are, whatever their container.
[[nodiscard]] bool moves_codes(const Plan& plan);
// An error for each target that holds codes which readers of the output would take for something
// else: experts that are joined while their scales stay one by one, say, or a weight that was
// renamed without them. `repacked` have the components that readers look for.
[[nodiscard]] std::vector<Finding> check_moved_codes(const Plan& plan,
                                                     const std::vector<RepackedTensor>& repacked,
                                                     bool dequantizes);
// Keeps, in the header's metadata that names the encoding of each layer, the layers whose codes the
// plan moves as they are, under the names that they get; `drops_all`: no codes stay. Values that
// the caller gave are not changed.
void keep_layer_metadata(Conversion& conversion, const ConvertOptions& options, bool drops_all);

// ---- files and configs

// Fills in files, index_name and bytes_to_write. Partners of one scale get one file, so that each
// file can be made by itself.
void lay_out(Conversion& conversion, const ConvertOptions& options);

// Adds warnings for each further model and each folder of an adapter: "merge.models" for other
// values in config.json (or, in GGUF, in the metadata of the architecture), for another vocabulary
// and for other files that libraries read with a model, "convert.not_copied" for modules that are
// lost. `given`: the files that the output gets, if it is a folder.
void tell_other_models(const Catalog& catalog, const MergeOptions& merge, const ModelFolder& given,
                       std::vector<Finding>& findings);
// Warns ("convert.activations") of what an output with other configs does not have. A cache: the
// scheme that the source's configs declare, and its scales. Activations of codes: their scales, and
// for `--style` alone a scheme that differs from the source's. `source` has the source's configs.
void tell_schemes(const Conversion& conversion, const ConvertOptions& source,
                  std::vector<Finding>& findings);
// Warns ("convert.lists") of each list of the output's configs, such as "ignore", that selects
// other modules of the output than it does of the source.
void tell_old_names(const Conversion& conversion, std::vector<Finding>& findings);

// Fills in the budget and the values derived from it; a finding where memory_bytes_max is too
// little.
void choose_sizes(Conversion& conversion, const ConvertOptions& options);

}  // namespace loadstone
