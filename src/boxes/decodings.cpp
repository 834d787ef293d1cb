#include "boxes/decodings.h"

#include <algorithm>

#include "boxes/cast_kind.h"
#include "codec/gguf/gguf.h"
#include "codec/tensor_table.h"
#include "loadstone/quantized_tensors.h"

namespace loadstone {

std::vector<std::string> merged_paths(const Catalog& catalog, std::span<const Decoding> decodings,
                                      const Recipe& recipe) {
  std::vector<std::string> paths;
  const auto& checkpoints = catalog.checkpoints();
  if (checkpoints.size() < 2) return paths;
  const auto sources = sources_of(recipe, decodings);
  for (std::uint32_t c = 1; c < checkpoints.size(); ++c) {
    const auto [begin, end] = catalog.tensors_of(c);
    const auto is_here = [&](std::uint32_t source) { return begin <= source && source < end; };
    if (std::ranges::any_of(sources, is_here)) paths.push_back(checkpoints[c]->shown_path());
  }
  return paths;
}

bool is_plain_fp8(const Catalog& catalog, std::uint32_t tensor) {
  if (tensor >= catalog.tensors().size()) return false;
  const TensorInfo& info = catalog.tensors()[tensor];
  if (!is_fp8(info)) return false;
  // FP8 tensors named as scales may belong to codes that no codec knows, except for these weights.
  const std::string_view leaf = std::string_view(info.name).substr(info.name.rfind('.') + 1);
  const bool is_weight = info.name.ends_with("norm.scale") || leaf.ends_with("scale_shift_table") ||
                         leaf.ends_with("logit_scale");
  if (leaf.find("scale") != std::string_view::npos && !is_weight) return false;
  return !catalog.quantized().is_component(tensor);
}

View numbers_view(const Catalog& catalog, std::uint32_t tensor, std::uint32_t number) {
  const QuantizedTensor* const quantized = catalog.quantized().find(tensor);
  const bool is_read = quantized != nullptr && quantized->is_readable();
  if (!is_read) return whole_view(number, catalog.tensors()[tensor].shape);
  View view = whole_view(number, quantized->decoding.shape);
  if (quantized->is_transposed) (void)transpose(view, -1, -2);  // the rank is at least 2
  return view;
}

Decoding numbers_decoding(const Catalog& catalog, std::uint32_t tensor, Dtype dtype) {
  const TensorInfo& info = catalog.tensors()[tensor];
  const QuantizedTensor* const quantized = catalog.quantized().find(tensor);
  const bool is_bytes = !info.encoding.is_dtype() && dtype == Dtype::u8;
  if (quantized == nullptr || is_bytes) return block_decoding(tensor, info, dtype);
  Decoding decoding = quantized->decoding;
  decoding.dtype = dtype;
  return decoding;
}

TensorRecipe tensor_recipe(const Catalog& catalog, std::uint32_t tensor,
                           std::optional<Dtype> wanted) {
  const TensorInfo& source = catalog.tensors()[tensor];
  const bool is_decoded =
      catalog.quantized().find(tensor) != nullptr || !source.encoding.is_dtype();
  const View view =
      is_decoded ? numbers_view(catalog, tensor, tensor) : source_view(tensor, source);
  TensorRecipe recipe = {.shape = view.shape, .boxes = boxes_of(view)};
  if (!is_decoded) {
    recipe.dtype = source.encoding.dtype();
    return recipe;
  }
  recipe.dtype = decoded_dtype(wanted.value_or(Dtype::f32));
  recipe.decodings = {numbers_decoding(catalog, tensor, recipe.dtype)};
  for (Box& box : recipe.boxes) box.decoding = 0;
  return recipe;
}

}  // namespace loadstone
