// Casts one value to another dtype. The results equal torch's on a CPU in every bit.
//
// A value is read into a wide type (std::int64_t, std::uint64_t, float or double) and written from
// it. As in torch, small floats go through float, so f64 to f16 deliberately rounds twice.
//
// In C++, casts of floats to an integer that cannot represent them are undefined, and torch's
// result depends on the CPU and, for u32, on the position in the tensor. loadstone gives torch's
// scalar result on x86-64: integers of up to 16 bits are truncated from 32 bits, and u32 from 64
// bits. With AVX-512, torch 2.13 differs from this only in f64 to u8 outside the range of i32, in
// floats to u32 outside its range, and in f8_e8m0 to integers: there a NaN becomes 0.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "loadstone/dtype.h"

namespace loadstone::number {

// ---- Floats as bits

// Shifts `value` right by `shift` bits and rounds to nearest, ties to even.
[[nodiscard]] constexpr std::uint32_t shift_to_nearest_even(std::uint32_t value,
                                                            unsigned shift) noexcept {
  if (shift >= 32) return 0;
  const std::uint32_t kept = value >> shift;
  const std::uint32_t rest = value - (kept << shift);
  const std::uint32_t half = std::uint32_t{1} << (shift - 1);
  return kept + (rest > half || (rest == half && (kept & 1u) != 0) ? 1u : 0u);
}

// Converts a finite magnitude of f32 to the bits of a small float with `mantissa_bits` and exponent
// bias `bias`. The caller handles overflow.
template <unsigned mantissa_bits, unsigned bias>
[[nodiscard]] constexpr std::uint32_t narrow(std::uint32_t magnitude) noexcept {
  constexpr unsigned cut = 23 - mantissa_bits;
  constexpr std::uint32_t smallest_normal = (127 - bias + 1) << 23;
  if (magnitude >= smallest_normal) {
    return shift_to_nearest_even(magnitude - ((127 - bias) << 23), cut);
  }
  const std::uint32_t exponent = magnitude >> 23;
  if (exponent == 0) return 0;  // subnormal in f32: far below half of the smallest result
  const std::uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
  return shift_to_nearest_even(significand, cut + (127 - bias + 1) - exponent);
}

[[nodiscard]] constexpr std::uint16_t f16_from_f32(std::uint32_t bits) noexcept {
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result = 0x7c00;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | ((magnitude >> 13) & 0x3ffu);  // a quiet NaN; cuts the payload like F16C
  } else if (magnitude < 0x47800000u) {
    result = narrow<10, 15>(magnitude);
  }
  return static_cast<std::uint16_t>(sign | result);
}

[[nodiscard]] constexpr std::uint32_t f32_from_f16(std::uint16_t half) noexcept {
  const std::uint32_t sign = (half & 0x8000u) << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  if (magnitude > 0x7c00u) return sign | 0x7fc00000u | (magnitude << 13);
  if (magnitude == 0x7c00u) return sign | 0x7f800000u;
  if (magnitude >= 0x0400u) return sign | ((magnitude << 13) + (112u << 23));
  return sign | std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);
}

// The two NaNs of bf16 that torch writes: all ones if it converts vectors (from f32 and f64), and
// 0x7fc0 if it converts single values (from all other dtypes).
inline constexpr std::uint16_t bf16_nan_vector = 0xffff;
inline constexpr std::uint16_t bf16_nan_scalar = 0x7fc0;

[[nodiscard]] constexpr std::uint16_t bf16_from_f32(std::uint32_t bits,
                                                    std::uint16_t nan) noexcept {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return nan;
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Saturates: infinities and values that are too large become the largest value.
[[nodiscard]] constexpr std::uint8_t f8_e4m3_from_f32(std::uint32_t bits) noexcept {
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result = 0x7e;
  if (magnitude > 0x7f800000u) {
    result = 0x7f;
  } else if (magnitude < 0x43e00000u) {  // 448
    result = narrow<3, 7>(magnitude);
  }
  return static_cast<std::uint8_t>(sign | result);
}

// Does not saturate: values that round to 65536 or more become infinite.
[[nodiscard]] constexpr std::uint8_t f8_e5m2_from_f32(std::uint32_t bits) noexcept {
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result = 0x7c;
  if (magnitude > 0x7f800000u) {
    result = 0x7f;
  } else if (magnitude < 0x47800000u) {
    result = narrow<2, 15>(magnitude);
  }
  return static_cast<std::uint8_t>(sign | result);
}

[[nodiscard]] constexpr std::uint32_t f32_from_f8_e4m3(std::uint8_t byte) noexcept {
  const std::uint32_t sign = (byte & 0x80u) << 24;
  const std::uint32_t magnitude = byte & 0x7fu;
  if (magnitude == 0x7f) return sign | 0x7ff00000u;
  if (magnitude >= 8) return sign | ((magnitude << 20) + (120u << 23));
  return sign | std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-9f);
}

[[nodiscard]] constexpr std::uint32_t f32_from_f8_e5m2(std::uint8_t byte) noexcept {
  return f32_from_f16(static_cast<std::uint16_t>(byte << 8));
}

// The result is a power of two, or NaN.
[[nodiscard]] constexpr std::uint32_t f32_from_f8_e8m0(std::uint8_t byte) noexcept {
  if (byte == 0) return 0x00400000u;
  if (byte == 0xff) return 0x7f800001u;
  return static_cast<std::uint32_t>(byte) << 23;
}

// ---- Floats to integers: truncates; values out of range have the results of x86-64

[[nodiscard]] constexpr std::int64_t to_i64(double value) noexcept {
  if (!(value >= -0x1p63 && value < 0x1p63)) return std::numeric_limits<std::int64_t>::min();
  return static_cast<std::int64_t>(value);
}

[[nodiscard]] constexpr std::int32_t to_i32(double value) noexcept {
  if (!(value > -2147483649.0 && value < 2147483648.0)) {
    return std::numeric_limits<std::int32_t>::min();
  }
  return static_cast<std::int32_t>(value);
}

[[nodiscard]] constexpr std::uint64_t to_u64(double value) noexcept {
  if (value >= 0x1p63) {
    return static_cast<std::uint64_t>(to_i64(value - 0x1p63)) ^ (std::uint64_t{1} << 63);
  }
  return static_cast<std::uint64_t>(to_i64(value));
}

template <std::integral Integer, std::floating_point Wide>
[[nodiscard]] constexpr Integer integer_from(Wide value) noexcept {
  if constexpr (std::same_as<Integer, std::uint64_t>) {
    return to_u64(static_cast<double>(value));
  } else if constexpr (sizeof(Integer) == 8 || std::same_as<Integer, std::uint32_t>) {
    return static_cast<Integer>(to_i64(static_cast<double>(value)));
  } else {
    return static_cast<Integer>(to_i32(static_cast<double>(value)));
  }
}

// ---- Arithmetic whose NaNs have the bits of x86-64 on every processor: those of the first NaN
// operand, made quiet, or invalid_nan if no operand is NaN

inline constexpr float invalid_nan = std::bit_cast<float>(0xffc00000u);

[[nodiscard]] inline float quiet(float nan) noexcept {
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(nan) | 0x00400000u);
}

// Returns the result of an operation on `a` and `b`, with the bits above if it is NaN.
[[nodiscard]] inline float with_known_nan(float a, float b, float result) noexcept {
  if (result == result) return result;
  if (a != a) return quiet(a);
  return b != b ? quiet(b) : invalid_nan;
}

[[nodiscard]] inline float product(float a, float b) noexcept {
  return with_known_nan(a, b, a * b);
}
[[nodiscard]] inline float quotient(float a, float b) noexcept {
  return with_known_nan(a, b, a / b);
}
[[nodiscard]] inline float sum(float a, float b) noexcept { return with_known_nan(a, b, a + b); }

// Returns true if products with the factor and quotients by it are NaN only for NaN values. Every
// processor keeps the bits of these.
[[nodiscard]] inline bool is_plain_factor(float factor) noexcept {
  return factor - factor == 0 && factor != 0;
}

// Multiplies each value by the factor.
inline void multiply(float* values, std::uint64_t count, float factor) noexcept {
  if (!is_plain_factor(factor)) {
    for (std::uint64_t i = 0; i < count; ++i) values[i] = product(values[i], factor);
    return;
  }
  for (std::uint64_t i = 0; i < count; ++i) values[i] *= factor;
}

// ---- Reading and writing one value

template <typename Raw>
[[nodiscard]] inline Raw load_raw(const std::byte* from) noexcept {
  Raw raw;
  std::memcpy(&raw, from, sizeof(Raw));
  return raw;
}

template <typename Raw>
inline void store_raw(std::byte* to, Raw raw) noexcept {
  std::memcpy(to, &raw, sizeof(Raw));
}

template <std::size_t bytes, bool is_signed>
struct IntegerOf;
// clang-format off
template <> struct IntegerOf<1, false> { using Type = std::uint8_t; };
template <> struct IntegerOf<1, true> { using Type = std::int8_t; };
template <> struct IntegerOf<2, false> { using Type = std::uint16_t; };
template <> struct IntegerOf<2, true> { using Type = std::int16_t; };
template <> struct IntegerOf<4, false> { using Type = std::uint32_t; };
template <> struct IntegerOf<4, true> { using Type = std::int32_t; };
template <> struct IntegerOf<8, false> { using Type = std::uint64_t; };
template <> struct IntegerOf<8, true> { using Type = std::int64_t; };
// clang-format on

// The C++ type of a dtype's bytes. It has the same size as the dtype.
template <Dtype dtype>
struct RawOf {
  static_assert(dtype_info(dtype).has_casts);
  static constexpr bool is_integer = kind(dtype) == DtypeKind::integer;
  using Type =
      typename IntegerOf<element_bytes(dtype), is_integer && dtype_info(dtype).is_signed>::Type;
};
// clang-format off
template <> struct RawOf<Dtype::f32> { using Type = float; };
template <> struct RawOf<Dtype::f64> { using Type = double; };
// clang-format on
template <Dtype dtype>
using Raw = typename RawOf<dtype>::Type;

template <Dtype dtype>
inline constexpr std::size_t bytes_of = sizeof(Raw<dtype>);

template <Dtype dtype>
[[nodiscard]] inline auto load(const std::byte* from) noexcept {
  if constexpr (dtype == Dtype::boolean) {
    return std::uint64_t{load_raw<std::uint8_t>(from) != 0};
  } else {
    const auto raw = load_raw<Raw<dtype>>(from);
    if constexpr (dtype == Dtype::f16) {
      return std::bit_cast<float>(f32_from_f16(raw));
    } else if constexpr (dtype == Dtype::bf16) {
      return std::bit_cast<float>(static_cast<std::uint32_t>(raw) << 16);
    } else if constexpr (dtype == Dtype::f8_e4m3) {
      return std::bit_cast<float>(f32_from_f8_e4m3(raw));
    } else if constexpr (dtype == Dtype::f8_e5m2) {
      return std::bit_cast<float>(f32_from_f8_e5m2(raw));
    } else if constexpr (dtype == Dtype::f8_e8m0) {
      return std::bit_cast<float>(f32_from_f8_e8m0(raw));
    } else if constexpr (kind(dtype) == DtypeKind::integer) {
      using Wide = IntegerOf<8, dtype_info(dtype).is_signed>;
      return static_cast<typename Wide::Type>(raw);
    } else {
      static_assert(dtype == Dtype::f32 || dtype == Dtype::f64);
      return raw;
    }
  }
}

template <Dtype dtype, typename Wide>
inline void store(std::byte* to, Wide value, std::uint16_t bf16_nan) noexcept {
  if constexpr (dtype == Dtype::boolean) {
    store_raw(to, static_cast<std::uint8_t>(value != Wide{0} ? 1 : 0));
  } else if constexpr (dtype == Dtype::f64) {
    store_raw(to, static_cast<double>(value));
  } else if constexpr (kind(dtype) == DtypeKind::integer) {
    if constexpr (std::floating_point<Wide>) {
      store_raw(to, integer_from<Raw<dtype>>(value));
    } else {
      store_raw(to, static_cast<Raw<dtype>>(value));
    }
  } else {
    const auto single = static_cast<float>(value);
    const auto bits = std::bit_cast<std::uint32_t>(single);
    if constexpr (dtype == Dtype::f32) {
      store_raw(to, single);
    } else if constexpr (dtype == Dtype::f16) {
      store_raw(to, f16_from_f32(bits));
    } else if constexpr (dtype == Dtype::bf16) {
      store_raw(to, bf16_from_f32(bits, bf16_nan));
    } else if constexpr (dtype == Dtype::f8_e4m3) {
      store_raw(to, f8_e4m3_from_f32(bits));
    } else {
      static_assert(dtype == Dtype::f8_e5m2);
      store_raw(to, f8_e5m2_from_f32(bits));
    }
  }
}

// Reads an element of `source` at `from`, and writes it as an element of `target` at `to`.
template <Dtype source, Dtype target>
inline void convert(const std::byte* from, std::byte* to) noexcept {
  constexpr bool by_vectors = source == Dtype::f32 || source == Dtype::f64;
  constexpr std::uint16_t nan = by_vectors ? bf16_nan_vector : bf16_nan_scalar;
  store<target>(to, load<source>(from), nan);
}

}  // namespace loadstone::number
