// Block sizes of the encodings in modelopt.h, and functions that compute their scales. All scales
// are finite and positive: the scale of values that are all 0 is 1. If the decoded value of the
// largest code would be infinite in the dtype of the values, loadstone uses the next smaller scale
// for which it is finite. ModelOpt writes infinities, and its dialects differ in them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/quantize.h"

namespace loadstone::scaled {

inline constexpr std::uint64_t nvfp4_block = 16;
inline constexpr std::uint64_t int4_block = 128;
inline constexpr std::uint64_t fp8_block = 128;  // rows and columns

// Returns the number of blocks for `count` values; the last block may be short.
[[nodiscard]] constexpr std::uint64_t blocks_in(std::uint64_t count, std::uint64_t block) noexcept {
  return count / block + (count % block != 0 ? 1u : 0u);
}

// Returns the largest F32 that is finite after rounding to F32, F16 or BF16.
[[nodiscard]] constexpr float most_finite(Dtype dtype) noexcept {
  if (dtype == Dtype::f16) return std::bit_cast<float>(0x477fefffu);  // below 65520
  // Just below the largest BF16 plus half a step.
  if (dtype == Dtype::bf16) return std::bit_cast<float>(0x7f7f7fffu);
  return std::bit_cast<float>(0x7f7fffffu);
}

// Rounds `value` to `dtype`, and returns it as F32.
[[nodiscard]] float rounded(Dtype dtype, float value) noexcept;

// Returns amax / most, the scale of fp8, int8 and int4-awq, where `most` is the largest code.
[[nodiscard]] float scale_of(const QuantizedLayout& form, float amax, float most) noexcept;
// Returns 7 / amax, the inverse scale of int4.
[[nodiscard]] float inverse_int4_scale(bool is_exact, Dtype dtype, float amax) noexcept;
// Returns amax / 7.5 as compressed-tensors computes it in `dtype`, the dtype of values and scales.
// The scale of zeros is that of the library, not 1.
[[nodiscard]] float int4_group_scale(Dtype dtype, float amax) noexcept;
// Returns the F32 scale of a tensor. In the dialect `exact`, the scale is large enough that its
// inverse, which compressed-tensors stores, is finite too.
[[nodiscard]] float nvfp4_scale_2(const QuantizedLayout& form, float amax) noexcept;
// Returns the scale with which the most blocks are exact; 0 if no scale fits.
[[nodiscard]] float exact_nvfp4_scale_2(const QuantizedLayout& form, float amax,
                                        const ExactScales& exact) noexcept;

}  // namespace loadstone::scaled

namespace loadstone::simd {

inline constexpr std::uint64_t mx_block = 32;

enum class MxType : std::uint8_t { mxfp4, mxfp8 };

// Returns log2 of the value, rounded to F32 like torch's and then up.
[[nodiscard]] int rounded_log_up(float value) noexcept;

// Returns the exponent of a block's scale as the scale's byte: 127 means 2^0, and the minimum is 0.
// The scale is the smallest whose codes reach `amax`. With `is_rounded_log`, the exponent is
// computed like ModelOpt: quotient and logarithm are rounded to F32, and so for a few values the
// exponent is one less.
template <MxType type>
[[nodiscard]] inline std::uint32_t mx_exponent(float amax, bool is_rounded_log) noexcept {
  constexpr bool is_mxfp4 = type == MxType::mxfp4;
  // The largest codes are 6 = 1.5 * 2^2 and 448 = 1.75 * 2^8. A larger mantissa carries.
  constexpr std::uint32_t carry = is_mxfp4 ? 0x3fffffu : 0x1fffffu;
  constexpr std::uint32_t bias = is_mxfp4 ? 2 : 8;
  if (!is_rounded_log) {
    const std::uint32_t exponent = (std::bit_cast<std::uint32_t>(amax) + carry) >> 23;
    return std::max(exponent, bias) - bias;
  }
  const float quotient = amax / (is_mxfp4 ? 6.0f : 448.0f);
  const auto bits = std::bit_cast<std::uint32_t>(quotient);
  const std::uint32_t mantissa = bits & 0x7fffffu;
  if (mantissa == 0 && bits != 0) return bits >> 23;
  if (mantissa < 64 || bits < (2u << 23)) {
    const int exponent = rounded_log_up(quotient);
    return static_cast<std::uint32_t>(std::max(exponent, -127) + 127);
  }
  return (bits >> 23) + 1;
}

// Limits for values that become infinite in `source` when they are decoded. This can happen from
// the scale byte `exponent` on. `largest` is the largest value whose decoded value is still finite.
struct MxTop {
  std::uint32_t exponent;
  float largest;
};
template <MxType type>
[[nodiscard]] constexpr MxTop mx_top(Dtype source) noexcept {
  if constexpr (type == MxType::mxfp4) {
    return source == Dtype::f16 ? MxTop{127 + 14, 3 * 0x1p14f} : MxTop{127 + 126, 3 * 0x1p126f};
  } else {
    return source == Dtype::f16 ? MxTop{127 + 8, 240 * 0x1p8f} : MxTop{127 + 120, 240 * 0x1p120f};
  }
}

// Returns 1 / scale for a scale's byte.
[[nodiscard]] inline float one_by_power(std::uint32_t exponent) noexcept {
  return std::bit_cast<float>((254u - exponent) << 23);
}

}  // namespace loadstone::simd
