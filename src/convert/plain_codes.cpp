#include "convert/plain_codes.h"

#include <algorithm>
#include <string_view>

#include "codec/tensor_table.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

namespace {

constexpr Dtype plain_fp8_dtype = Dtype::bf16;

bool copies_plain_fp8(const Catalog& catalog, const TargetRecipe& recipe) {
  return !recipe.boxes.empty() && recipe.merge == nullptr &&
         std::ranges::all_of(recipe.boxes, [&](const Box& box) {
           return box.decoding == no_decoding && is_plain_fp8(catalog, box.source);
         });
}

// Returns true for integers as codes are stored. Ids of positions are I64 too, in one row.
bool is_array_of_integers(const TensorInfo& tensor) {
  if (is_dtype(tensor, {Dtype::i64, Dtype::u64})) {
    const auto is_several = [](std::uint64_t extent) { return extent > 1; };
    return std::ranges::count_if(tensor.shape.extents(), is_several) > 1;
  }
  return tensor.shape.numel().value_or(0) > 1 &&
         is_dtype(tensor, {Dtype::i8, Dtype::u8, Dtype::i16, Dtype::u16, Dtype::i32, Dtype::u32});
}

}  // namespace

bool is_plain_fp8(const Catalog& catalog, const TargetRecipe& recipe) {
  const bool is_fp8 = recipe.dtype == Dtype::f8_e4m3 || recipe.dtype == Dtype::f8_e5m2;
  return is_fp8 && copies_plain_fp8(catalog, recipe);
}

bool may_hold_codes(const Catalog& catalog) {
  for (std::uint32_t i = 0; i < catalog.tensors().size(); ++i) {
    if (is_plain_fp8(catalog, i) || is_array_of_integers(catalog.tensors()[i])) return true;
  }
  return false;
}

void widen_plain_fp8(const Catalog& catalog, Recipes& recipes) {
  for (TargetRecipe& recipe : recipes.targets) {
    if (is_plain_fp8(catalog, recipe)) recipe.dtype = plain_fp8_dtype;
  }
}

void restore_plain_fp8(const Catalog& catalog, const Choices& choices, Recipes& recipes) {
  for (TargetRecipe& recipe : recipes.targets) {
    if (recipe.dtype != plain_fp8_dtype || !copies_plain_fp8(catalog, recipe)) continue;
    if (choices.quantize.contains(recipe.target) || choices.numbers.contains(recipe.target)) {
      continue;
    }
    recipe.dtype = catalog.tensors()[recipe.boxes.front().source].encoding.dtype();
  }
}

}  // namespace loadstone
