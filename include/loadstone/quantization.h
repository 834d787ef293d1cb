// Quantization of a tensor: the encoding to write, and the components that it has.
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

// An encoding of quantized tensors. New ones may be added, so encodings and dialects are strings,
// not an enum. Bytes: docs/formats/bitsandbytes.md, docs/formats/modelopt.md and others there.
struct QuantizedEncoding {
  std::string_view name;  // "nf4", "fp8-block" ...
  // Variants of the bytes to write ("exact", "modelopt-compat", "bnb-cuda" ...), the default first;
  // empty: loadstone only reads the encoding.
  std::span<const std::string_view> dialects;
};

// All encodings that loadstone reads; it writes those with dialects. Lives as long as the program.
[[nodiscard]] LOADSTONE_API std::vector<QuantizedEncoding> quantized_encodings();

// Parameters for quantizing a tensor.
struct Quantization {
  std::string encoding;                // of quantized_encodings(), one with dialects
  std::string dialect;                 // one of the encoding's; empty: the default
  std::uint32_t block_size = 64;       // nf4, fp4: 32, 64 ... 4096 elements per scale
  bool nested = false;                 // nf4, fp4: scales in 8 bits
  std::optional<float> nested_offset;  // nullopt: the mean of the scales
  // Targets of one plan with the same name here (not empty) share a scale (fp8, nvfp4): that of the
  // largest magnitude among them, matrix by matrix in a stack.
  std::string group;
  // GGUF's blocks: the weight of each column's errors, like ggml's "imatrix": finite, not negative,
  // one per column, or per column of each matrix of a stack. Null: values alone decide. Equal
  // quantizations share the object.
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

// The components of a tensor of this shape and dtype (of its values: F32, F16 or BF16), the data
// first. Throws Error "plan.quantize" if the encoding does not support it.
[[nodiscard]] LOADSTONE_API std::vector<QuantizedPart> quantized_parts(
    const Quantization& quantization, const Shape& shape, Dtype dtype);

}  // namespace loadstone
