#include "convert/plain_codes.h"

#include <algorithm>
#include <string_view>

#include "codec/tensor_table.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

constexpr Dtype wide = Dtype::bf16;

bool copies_plain_fp8(const Catalog& catalog, const TargetRecipe& recipe) {
  return !recipe.boxes.empty() && recipe.merge == nullptr &&
         std::ranges::all_of(recipe.boxes, [&](const Box& box) {
           return box.decoding == no_decoding && is_plain_fp8(catalog, box.source);
         });
}

}  // namespace

bool is_plain_fp8(const Catalog& catalog, const TargetRecipe& recipe) {
  const bool is_fp8 = recipe.dtype == Dtype::f8_e4m3 || recipe.dtype == Dtype::f8_e5m2;
  return is_fp8 && copies_plain_fp8(catalog, recipe);
}

bool has_plain_fp8(const Catalog& catalog) {
  for (std::uint32_t i = 0; i < catalog.tensors().size(); ++i) {
    if (is_plain_fp8(catalog, i)) return true;
  }
  return false;
}

void widen_plain_fp8(const Catalog& catalog, Recipes& recipes) {
  for (TargetRecipe& recipe : recipes.targets) {
    if (is_plain_fp8(catalog, recipe)) recipe.dtype = wide;
  }
}

void restore_plain_fp8(const Catalog& catalog, const Choices& choices, Recipes& recipes) {
  for (TargetRecipe& recipe : recipes.targets) {
    if (recipe.dtype != wide || !copies_plain_fp8(catalog, recipe)) continue;
    if (choices.quantize.contains(recipe.target) || choices.numbers.contains(recipe.target)) {
      continue;
    }
    recipe.dtype = catalog.tensors()[recipe.boxes.front().source].encoding.dtype();
  }
}

}  // namespace loadstone
