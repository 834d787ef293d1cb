// Makes the recipes for the tensors of an output.
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

// Returns recipes for the tensors that rules and recipes produce from the sources. A conversion has
// only the checkpoint and not the model, so each of its tensors gets a recipe, in the order of the
// source files. Adds problems to `findings`.
[[nodiscard]] Values output_recipes(const std::shared_ptr<const Catalog>& catalog,
                                    const ConvertOptions& options, bool is_decoded,
                                    std::vector<Finding>& findings);

// Returns the names of the tensors with these indices.
[[nodiscard]] std::vector<std::string> tensor_names(const Catalog& catalog,
                                                    const std::vector<std::uint32_t>& tensors);

// Returns true if the recipe copies components of quantized tensors. This includes codes that are
// stored as floats (bitsandbytes' quant_storage).
template <typename Recipe>
[[nodiscard]] bool has_component(const Catalog& catalog, const Recipe& recipe) {
  bool found = false;
  for_each_box(recipe, [&](const Box& box) {
    found |= box.decoding == no_decoding && catalog.quantized().is_component(box.source);
  });
  return found;
}

// Returns true if the recipe only copies FP8 tensors without scales and keeps their dtype. The
// elements of such tensors are values, not codes.
[[nodiscard]] bool is_plain_fp8(const Catalog& catalog, const TargetRecipe& recipe);
// Makes recipes for which is_plain_fp8() is true yield BF16, so that they can be quantized. BF16
// represents all FP8 values.
void widen_plain_fp8(const Catalog& catalog, Recipes& recipes);
// Restores the dtype that widen_plain_fp8() changed, for recipes that were not chosen to be
// quantized.
struct Choices;
void restore_plain_fp8(const Catalog& catalog, const Choices& choices, Recipes& recipes);
// Returns true if there are integer or FP8 tensors that could be codes of an unknown layout.
[[nodiscard]] bool may_hold_codes(const Catalog& catalog);

}  // namespace loadstone
