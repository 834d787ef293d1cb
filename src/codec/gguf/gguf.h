// Decodes blocks that contain their scales, some with a further scale in a separate tensor. See
// docs/formats/gguf.md
#pragma once

#include "codec/families.h"

namespace loadstone {

// Returns true if rows of the shape are not whole blocks. Files can store such a tensor only under
// a different shape.
[[nodiscard]] bool has_cut_blocks(Encoding encoding, const Shape& shape) noexcept;
// Returns the shape of the tensor's bytes: the last dimension counts the bytes of a row. If rows
// are not whole blocks, there is only one dimension.
[[nodiscard]] Shape shape_of_bytes(Encoding encoding, const Shape& shape);

// Returns true if blocks of this encoding may have a scale in a separate tensor.
[[nodiscard]] bool may_have_scale(Encoding encoding) noexcept;

// Returns the decoding of the tensor with this index. If `dtype` is U8, it copies the bytes.
[[nodiscard]] Decoding block_decoding(std::uint32_t index, const TensorInfo& tensor, Dtype dtype);

[[nodiscard]] std::span<const WrittenEncoding> gguf_written() noexcept;
// Returns the names of all encodings, including those that loadstone only reads.
[[nodiscard]] std::span<const std::string_view> gguf_encodings() noexcept;

}  // namespace loadstone
