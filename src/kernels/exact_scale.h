// Finds scales with which every value of a block is a code, so that encoding loses nothing. Values
// that were decoded from another encoding often have such a scale. The check decodes each code with
// the arithmetic of the decoders, so a scale that is found is exact by construction.
//
// All functions are thread-safe and give the same results on every instruction set.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "loadstone/dtype.h"

namespace loadstone {

// The values of an encoding's codes: small floats, integers in two's complement, and IQ4's table.
enum class CodeSet : std::uint8_t { e4m3, e2m1, int4, int5, int8, iq4 };

// The arithmetic of a block: value = code * scale, or code / scale if `is_inverse`.
struct BlockArithmetic {
  CodeSet codes = CodeSet::e4m3;
  // Dtype of the stored scale: F32, F16, F8_E8M0, or F8_E4M3, which is multiplied by `outer` first.
  Dtype scale = Dtype::f32;
  float outer = 1;
  bool is_inverse = false;
  bool has_signed_scale = false;  // true if the scale may be negative
};

// The values of a block: rows of a larger matrix. The distance between rows is `stride` values.
struct BlockValues {
  const float* values = nullptr;
  std::uint64_t columns = 0;
  std::uint64_t rows = 1;
  std::uint64_t stride = 0;
};

// Returns the scale to store. Returns nullopt if no scale is exact, if all values are 0, and if a
// value is not finite.
[[nodiscard]] std::optional<float> exact_scale(const BlockArithmetic& block,
                                               const BlockValues& values) noexcept;

// Finds as many exact scales as `found` can take, the smallest first. Returns their number.
[[nodiscard]] std::size_t exact_scales(const BlockArithmetic& block, const BlockValues& values,
                                       std::span<float> found) noexcept;

// Writes the code of each value, one per byte: the bits of a float, an integer in two's complement,
// or an index into the table.
void write_codes(const BlockArithmetic& block, float scale, std::span<const float> values,
                 std::uint8_t* codes) noexcept;

// A block with value = code * scale + minimum. Both are F16.
struct AffineScale {
  float scale = 0;
  float minimum = 0;
};
// Codes are integers from 0 to `top`. Returns nullopt like exact_scale().
[[nodiscard]] std::optional<AffineScale> exact_affine(int top,
                                                      std::span<const float> values) noexcept;
void write_affine_codes(const AffineScale& scale, int top, std::span<const float> values,
                        std::uint8_t* codes) noexcept;

}  // namespace loadstone
