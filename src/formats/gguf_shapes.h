// Shapes of tensors that ComfyUI's GGUF files store with folded rows: the key
// "comfy.gguf.orig_shape.NAME" has the shape in the model.
#pragma once

#include <string_view>
#include <vector>

#include "loadstone/catalog.h"

namespace loadstone {

inline constexpr std::string_view gguf_shape_prefix = "comfy.gguf.orig_shape.";

// Gives tensors of GGUF files the shapes that the metadata has for them. Throws Error "gg.kv_type"
// for a value that is not an array of integers, "gg.dims" for another number of elements.
void restore_gguf_shapes(const Metadata& metadata, const std::vector<Shard>& shards,
                         std::vector<TensorInfo>& tensors);

// Returns the shape with rows of whole blocks into which other rows are folded: ComfyUI's 256
// elements, or one block.
[[nodiscard]] Shape folded_shape(Encoding encoding, const Shape& shape);
// The value of the key, an array of I32.
[[nodiscard]] MetadataValue gguf_shape_value(const Shape& shape);

}  // namespace loadstone
