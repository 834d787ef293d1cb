// ComfyUI's markers, which name the layout of a module's codes.
#pragma once

#include <string_view>
#include <vector>

#include "codec/tensor_table.h"

namespace loadstone::comfyui {

// Last part of the name of a marker: a U8 tensor with JSON, such as {"format": "nvfp4"}.
inline constexpr std::string_view marker_leaf = "comfy_quant";
// Key of JSON in the header's metadata: {"layers": {module: marker}}. ComfyUI prefers it to the
// tensors "module.comfy_quant", which contain the same markers.
inline constexpr std::string_view layers_metadata_key = "_quantization_metadata";

// Decodes tensors by their markers, and rejects a tensor whose marker names a different encoding
// than its names and shapes suggest: for example, rotated columns cannot be recognised by shape.
// Reads the marker tensors.
void apply_markers(const TensorTable& table, std::vector<QuantizedTensor>& found);

}  // namespace loadstone::comfyui
