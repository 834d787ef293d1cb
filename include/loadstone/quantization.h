// Quantization of a tensor: the encoding to write, and the components that it consists of.
#pragma once

#include <algorithm>
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

// An encoding of quantized tensors. More encodings may be added, so encodings and dialects are
// strings, not enums. docs/formats/bitsandbytes.md, docs/formats/modelopt.md and others specify the
// bytes.
struct QuantizedEncoding {
  std::string_view name;  // "nf4", "fp8-block" ...
  // Variants of the bytes to write ("exact", "modelopt-compat", "bnb-cuda" ...), the default first.
  // Empty: loadstone only reads the encoding.
  std::span<const std::string_view> dialects;
};

// Returns all encodings that loadstone reads. It writes only encodings that have dialects.
[[nodiscard]] LOADSTONE_API std::vector<QuantizedEncoding> quantized_encodings();

// Parameters for quantizing a tensor.
struct Quantization {
  std::string encoding{};                // name of a quantized_encodings() element with dialects
  std::string dialect{};                 // one of the encoding's dialects; empty: the default
  std::uint32_t block_size = 64;         // nf4, fp4: elements per scale: 32, 64 ... 4096
  bool nested = false;                   // nf4, fp4: also quantize the scales, to 8 bits
  std::optional<float> nested_offset{};  // nullopt: the mean of the scales
  // Targets of one plan with the same string here (not empty) share a scale (fp8, nvfp4): the scale
  // of the largest magnitude among them. In stacks, matrices of the same index share a scale.
  std::string group{};
  // GGUF's blocks: weights of each column's errors, like ggml's "imatrix": finite, not negative,
  // one per column or, for a stack of matrices, one per column of each matrix. Null: all columns
  // count by their values alone. Equal quantizations share the object.
  std::shared_ptr<const std::vector<float>> importance{};
  // True: the encoder gives each block a scale with which it decodes to the same values, if there
  // is one. nullopt: true if the values are decoded codes; plans decide this. bitsandbytes'
  // encodings and the dialects of ModelOpt ignore it.
  std::optional<bool> exact_first{};

  friend bool operator==(const Quantization&, const Quantization&) = default;
};

// The effect of a change of encoding on values, as far as encodings and shapes determine it.
enum class Fidelity : std::uint8_t {
  exact,                   // all values stay equal
  exact_where_scales_fit,  // blocks stay equal if the new encoding can represent their scales
  lossy
};
// Returns "exact", "exact where scales fit" or "lossy".
[[nodiscard]] LOADSTONE_API std::string_view name(Fidelity fidelity) noexcept;

// The loss of values that were codes before, and are encoded again. A block is the values of one
// scale; for nvfp4 of one block scale.
struct EncodingLoss {
  std::uint64_t blocks = 0;
  std::uint64_t exact_blocks = 0;  // blocks that decode to the same values
  // The largest error, relative to the largest magnitude of its block. For fp8: of its tensors.
  double largest_error = 0;
  // Blocks that became 0 because their values are too small for the dtype of the scale. Counted for
  // all values that are encoded, even if `blocks` is 0 because the values were not codes before.
  std::uint64_t zeroed_blocks = 0;

  void join(const EncodingLoss& other) noexcept {
    blocks += other.blocks;
    exact_blocks += other.exact_blocks;
    largest_error = std::max(largest_error, other.largest_error);
    zeroed_blocks += other.zeroed_blocks;
  }
  friend bool operator==(const EncodingLoss&, const EncodingLoss&) = default;
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

// Returns the components of a tensor with values of this shape and dtype (F32, F16 or BF16), the
// data first. Throws Error "plan.quantize" if the encoding does not support shape or dtype.
[[nodiscard]] LOADSTONE_API std::vector<QuantizedPart> quantized_parts(
    const Quantization& quantization, const Shape& shape, Dtype dtype);

}  // namespace loadstone
