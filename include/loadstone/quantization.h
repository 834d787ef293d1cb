// How a value is kept in fewer bits than its numbers have: as parts, which only together mean it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "loadstone/dtype.h"
#include "loadstone/shape.h"

namespace loadstone {

// What to make of a value. Encodings and their parts: docs/formats/bitsandbytes.md,
// docs/formats/modelopt.md.
struct Quantization {
  std::string encoding;                // "nf4", "fp8", "nvfp4" ...
  std::string dialect;                 // whose bytes; empty: the encoding's first
  std::uint32_t block_size = 64;       // nf4, fp4: 32, 64 ... 4096 elements with one scale
  bool nested = false;                 // nf4, fp4: the scales in 8 bits
  std::optional<float> nested_offset;  // none: the mean of the scales
  // Targets of one plan with the same one, if it is not empty, share what would be the scale of
  // each (fp8, nvfp4): that of the largest magnitude in any of them, matrix by matrix of a stack.
  std::string group;

  friend bool operator==(const Quantization&, const Quantization&) = default;
};

// A tensor that is part of a quantized value.
struct QuantizedPart {
  std::string name;  // "data", "absmax" ...
  Shape shape;
  Dtype dtype = Dtype::u8;

  [[nodiscard]] std::uint64_t byte_count() const noexcept {
    return Encoding(dtype).byte_count(shape.numel().value_or(0)).value_or(0);
  }
};

// The parts of a value of this shape and dtype, the data first. Throws Error "plan.quantize" where
// there is no such encoding for it.
[[nodiscard]] std::vector<QuantizedPart> quantized_parts(const Quantization& quantization,
                                                         const Shape& shape, Dtype dtype);

}  // namespace loadstone
