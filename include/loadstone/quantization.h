// Quantizing a tensor: the encoding to write, and the components that it becomes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/dtype.h"
#include "loadstone/export.h"
#include "loadstone/shape.h"

namespace loadstone {

// An encoding of quantized tensors. The set grows, so encodings and dialects are names and no enum.
// Bytes: docs/formats/bitsandbytes.md, docs/formats/modelopt.md and their neighbours.
struct QuantizedEncoding {
  std::string_view name;  // "nf4", "fp8-block" ...
  // Whose bytes are written ("exact", "modelopt-compat", "bnb-cuda" ...), the default first; empty:
  // the encoding is read only.
  std::span<const std::string_view> dialects;
};

// All that are read; those that are written are among them. What it names lives as long as the
// program.
[[nodiscard]] LOADSTONE_API std::vector<QuantizedEncoding> quantized_encodings();

// How to quantize a tensor.
struct Quantization {
  std::string encoding;                // of quantized_encodings(), one with dialects
  std::string dialect;                 // one of the encoding's; empty: its first
  std::uint32_t block_size = 64;       // nf4, fp4: 32, 64 ... 4096 elements with one scale
  bool nested = false;                 // nf4, fp4: the scales in 8 bits
  std::optional<float> nested_offset;  // none: the mean of the scales
  // Targets of one plan with the same one, if it is not empty, share what would be the scale of
  // each (fp8, nvfp4): that of the largest magnitude in any of them, matrix by matrix of a stack.
  std::string group;
  // Blocks of GGUF: how much the numbers of each column weigh, as in ggml's "imatrix": finite, not
  // negative, one for each column, or for each column of each matrix of a stack. Null: the numbers
  // decide. Equal quantizations have the same object.
  std::shared_ptr<const std::vector<float>> importance{};

  friend bool operator==(const Quantization&, const Quantization&) = default;
};

// A component of a quantized tensor.
struct QuantizedPart {
  std::string name;  // "data", "absmax" ...
  Shape shape;
  Dtype dtype = Dtype::u8;

  [[nodiscard]] std::uint64_t byte_count() const noexcept {
    return Encoding(dtype).byte_count(shape.numel().value_or(0)).value_or(0);
  }
};

// The components of a tensor of this shape and dtype (of its numbers: F32, F16 or BF16), the data
// first. Throws Error "plan.quantize" where there is no such encoding for it.
[[nodiscard]] LOADSTONE_API std::vector<QuantizedPart> quantized_parts(
    const Quantization& quantization, const Shape& shape, Dtype dtype);

}  // namespace loadstone
