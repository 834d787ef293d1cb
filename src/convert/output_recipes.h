// The recipes of the tensors of an output.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "boxes/merges.h"
#include "convert/values.h"
#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/quantized_tensors.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Returns the tensors that rules and recipes make of the sources, without a model: a recipe for
// each, in the file's order. Obstacles are added to `findings`.
[[nodiscard]] Values output_recipes(const std::shared_ptr<const Catalog>& catalog,
                                    const ConvertOptions& options, bool is_decoded,
                                    std::vector<Finding>& findings);

// Names of a catalog's tensors.
[[nodiscard]] std::vector<std::string> tensor_names(const Catalog& catalog,
                                                    const std::vector<std::uint32_t>& tensors);

// Returns true if the recipe copies components of quantized tensors as they are. Codes may be
// stored as floats (bitsandbytes' quant_storage).
template <typename Recipe>
[[nodiscard]] bool has_component(const Catalog& catalog, const Recipe& recipe) {
  bool found = false;
  for_each_box(recipe, [&](const Box& box) {
    found |= box.decoding == no_decoding && catalog.quantized().is_component(box.source);
  });
  return found;
}

// Returns whether the recipe copies from FP8 tensors alone to which no scale belongs, so that their
// codes are numbers as they are, and keeps their dtype.
[[nodiscard]] bool is_plain_fp8(const Catalog& catalog, const TargetRecipe& recipe);
// Recipes of such tensors make BF16, which holds their numbers, so that they can be quantized.
void widen_plain_fp8(const Catalog& catalog, Recipes& recipes);
// Recipes that were not chosen get their own dtype again.
struct Choices;
void restore_plain_fp8(const Catalog& catalog, const Choices& choices, Recipes& recipes);
// Returns whether there are integers or FP8 that could be codes of an unknown layout.
[[nodiscard]] bool may_hold_codes(const Catalog& catalog);

}  // namespace loadstone
