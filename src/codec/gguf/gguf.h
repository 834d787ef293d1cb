// Blocks that contain their scales, some with a further scale in a separate tensor.
// docs/formats/gguf.md
#pragma once

#include "codec/families.h"

namespace loadstone {

// Returns whether rows of the shape are not whole blocks: files can only store the tensor folded.
[[nodiscard]] bool has_cut_blocks(Encoding encoding, const Shape& shape) noexcept;
// Shape of a tensor's bytes, row by row.
[[nodiscard]] Shape shape_of_bytes(Encoding encoding, const Shape& shape);

// Returns true if a scale in a separate tensor may belong to the blocks.
[[nodiscard]] bool may_have_scale(Encoding encoding) noexcept;

// Returns the decoding of the tensor with this index; for U8 its bytes.
[[nodiscard]] Decoding block_decoding(std::uint32_t index, const TensorInfo& tensor, Dtype dtype);

[[nodiscard]] std::span<const WrittenEncoding> gguf_written() noexcept;
// Names of encodings, including read-only ones.
[[nodiscard]] std::span<const std::string_view> gguf_encodings() noexcept;

}  // namespace loadstone
