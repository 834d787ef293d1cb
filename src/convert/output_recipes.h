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

// Returns the tensors that rules and recipes produce from the sources, without a model: one recipe
// each, in file order. Adds problems to `findings`.
[[nodiscard]] Values output_recipes(const std::shared_ptr<const Catalog>& catalog,
                                    const ConvertOptions& options, bool is_decoded,
                                    std::vector<Finding>& findings);

// Names of a catalog's tensors.
[[nodiscard]] std::vector<std::string> tensor_names(const Catalog& catalog,
                                                    const std::vector<std::uint32_t>& tensors);

// Returns true if the recipe copies components of quantized tensors. Codes may be stored as floats
// (bitsandbytes' quant_storage).
template <typename Recipe>
[[nodiscard]] bool has_component(const Catalog& catalog, const Recipe& recipe) {
  bool found = false;
  for_each_box(recipe, [&](const Box& box) {
    found |= box.decoding == no_decoding && catalog.quantized().is_component(box.source);
  });
  return found;
}

// Returns true if the recipe copies only from FP8 tensors without scales, whose codes are values,
// and keeps their dtype.
[[nodiscard]] bool is_plain_fp8(const Catalog& catalog, const TargetRecipe& recipe);
// Makes recipes of such tensors yield BF16, which represents their values, for quantization.
void widen_plain_fp8(const Catalog& catalog, Recipes& recipes);
// Restores the dtype of recipes that were not chosen.
struct Choices;
void restore_plain_fp8(const Catalog& catalog, const Choices& choices, Recipes& recipes);
// Returns true if there are integers or FP8 tensors that could be codes of an unknown layout.
[[nodiscard]] bool may_hold_codes(const Catalog& catalog);

}  // namespace loadstone
