// Restores the shapes of tensors that ComfyUI's GGUF files store with folded rows. The key
// "comfy.gguf.orig_shape.NAME" contains the tensor's shape in the model.
#pragma once

#include <string_view>
#include <vector>

#include "loadstone/catalog.h"

namespace loadstone {

inline constexpr std::string_view gguf_shape_prefix = "comfy.gguf.orig_shape.";

// Sets the tensors of GGUF files to the shapes that the metadata declares. Throws Error
// "gg.kv_type" if a shape is not an array of integers, "gg.dims" if the number of elements differs.
void restore_gguf_shapes(const Metadata& metadata, const std::vector<Shard>& shards,
                         std::vector<TensorInfo>& tensors);

// Returns a shape of two dims with the same elements, whose rows are whole blocks. A row has 256
// elements, as in ComfyUI, or one block if 256 does not divide the number of elements.
[[nodiscard]] Shape folded_shape(Encoding encoding, const Shape& shape);
// Returns the value that the key has for this shape, an array of I32.
[[nodiscard]] MetadataValue gguf_shape_value(const Shape& shape);

}  // namespace loadstone
