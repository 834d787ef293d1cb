// The number of values per scale in the encodings of modelopt.h, and the scale. All scales are
// finite and positive: 1 instead of 0, for values that are all 0. If the largest code would be
// infinite in the dtype of the values, the next smaller scale without that is used; ModelOpt, whose
// dialects differ here, writes infinities.
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

// The last of which may be a short one.
[[nodiscard]] constexpr std::uint64_t blocks_in(std::uint64_t count, std::uint64_t block) noexcept {
  return count / block + (count % block != 0 ? 1u : 0u);
}

// The largest F32 that is finite when it is rounded to F32, F16 or BF16.
[[nodiscard]] constexpr float most_finite(Dtype dtype) noexcept {
  if (dtype == Dtype::f16) return std::bit_cast<float>(0x477fefffu);   // below 65520
  if (dtype == Dtype::bf16) return std::bit_cast<float>(0x7f7f7fffu);  // half a step above the last
  return std::bit_cast<float>(0x7f7fffffu);
}

// `value` as the dtype has it.
[[nodiscard]] float rounded(Dtype dtype, float value) noexcept;

// amax / most, of fp8, int8 and int4-awq.
[[nodiscard]] float scale_of(const QuantizedLayout& form, float amax, float most) noexcept;
// 7 / amax.
[[nodiscard]] float inverse_int4_scale(bool is_exact, Dtype dtype, float amax) noexcept;
// In "exact" it is so large that its inverse, which compressed-tensors keeps, is finite too.
[[nodiscard]] float nvfp4_scale_2(const QuantizedLayout& form, float amax) noexcept;

}  // namespace loadstone::scaled

namespace loadstone::simd {

inline constexpr std::uint64_t mx_block = 32;

enum class MxType : std::uint8_t { mxfp4, mxfp8 };

// torch's log2 in F32, rounded up, of a quotient slightly above a power of two.
[[nodiscard]] int rounded_log_up(float value) noexcept;

// The exponent of a block's scale, the smallest whose codes reach `amax`, as the scale's byte: 127
// is 2^0, and the minimum is 0. `is_rounded_log`: that of the quotient's logarithm, both rounded to
// F32, which is one less for a few values.
template <MxType type>
[[nodiscard]] inline std::uint32_t mx_exponent(float amax, bool is_rounded_log) noexcept {
  constexpr bool is_mxfp4 = type == MxType::mxfp4;
  // 6 is 1.5 * 2^2 and 448 is 1.75 * 2^8: a larger mantissa carries.
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

// The exponent above which values of `source` can round up to infinity, and the largest value whose
// code is finite with it.
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

// 1 / the scale of this byte.
[[nodiscard]] inline float one_by_power(std::uint32_t exponent) noexcept {
  return std::bit_cast<float>((254u - exponent) << 23);
}

}  // namespace loadstone::simd
