// Blocks that hold their scales, and some with another scale in a tensor of its own.
// docs/formats/gguf.md
#pragma once

#include "codec/families.h"

namespace loadstone {

// Returns whether rows of the shape are not whole blocks: files can only store the tensor folded.
[[nodiscard]] bool has_cut_blocks(Encoding encoding, const Shape& shape) noexcept;
// Of a tensor of a block format, row by row.
[[nodiscard]] Shape shape_of_bytes(Encoding encoding, const Shape& shape);

// Returns whether a scale in a tensor of its own may belong to the blocks.
[[nodiscard]] bool may_have_scale(Encoding encoding) noexcept;

// Gives the numbers of the tensor with this index; for U8 its bytes as they are.
[[nodiscard]] Decoding block_decoding(std::uint32_t index, const TensorInfo& tensor, Dtype dtype);

[[nodiscard]] std::span<const WrittenEncoding> gguf_written() noexcept;
// Their names, and those of blocks that are only read.
[[nodiscard]] std::span<const std::string_view> gguf_encodings() noexcept;

}  // namespace loadstone
