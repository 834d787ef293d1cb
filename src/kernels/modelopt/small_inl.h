// Encodes vectors of values as small floats, and rounds quotients as ModelOpt does. Included by
// files that Highway compiles once for each instruction set.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/modelopt/scales.h"
#include "kernels/numbers_inl.h"

#ifndef LOADSTONE_KERNELS_MODELOPT_SMALL_INL_ONCE
#define LOADSTONE_KERNELS_MODELOPT_SMALL_INL_ONCE

namespace loadstone::simd {

// Returns the index of the first non-finite value, or `count`.
template <Dtype source>
inline std::uint64_t find_not_finite(const std::byte* from, std::uint64_t count) noexcept {
  return find_number<source>(from, count, [](float value) { return !is_finite_number(value); });
}

// Returns the largest finite magnitude.
template <Dtype source>
inline float finite_magnitude(const std::byte* from, std::uint64_t count) noexcept {
  float most = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const float value = number::load<source>(from + i * number::bytes_of<source>);
    if (is_finite_number(value)) most = std::max(most, std::abs(value));
  }
  return most;
}

// Copies values, with 0 for each NaN.
template <Dtype source>
inline void zero_nans(const std::byte* from, std::uint64_t count, std::byte* to) noexcept {
  constexpr std::size_t bytes = number::bytes_of<source>;
  std::memcpy(to, from, count * bytes);
  for (std::uint64_t i = 0; i < count; ++i) {
    const float value = number::load<source>(from + i * bytes);
    if (value != value) std::memset(to + i * bytes, 0, bytes);
  }
}

// Copies values, with magnitudes limited to `most`. Keeps NaNs.
template <Dtype source>
inline void limit_magnitudes(float most, const std::byte* from, std::uint64_t count,
                             std::byte* to) noexcept {
  constexpr std::size_t bytes = number::bytes_of<source>;
  for (std::uint64_t i = 0; i < count; ++i) {
    const float value = number::load<source>(from + i * bytes);
    const float limited = std::abs(value) > most ? std::copysign(most, value) : value;
    number::store<source>(to + i * bytes, limited, number::bf16_nan_scalar);
  }
}

}  // namespace loadstone::simd
#endif

#if defined(LOADSTONE_KERNELS_MODELOPT_SMALL_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOADSTONE_KERNELS_MODELOPT_SMALL_INL_H
#undef LOADSTONE_KERNELS_MODELOPT_SMALL_INL_H
#else
#define LOADSTONE_KERNELS_MODELOPT_SMALL_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

// Rounds to the nearest value of `source`, ties to even. For F16, limits magnitudes to 32768, which
// is beyond all codes.
template <Dtype source>
HWY_INLINE VF round_to(VF values) {
  if constexpr (source == Dtype::f16) {
    const VF most = hn::Set(F32(), 32768.0f);
    const VF limited = hn::Min(hn::Max(values, hn::Neg(most)), most);
    return hn::CopySign(round_to_half(limited), values);  // restores the sign of zeros
  } else if constexpr (source == Dtype::bf16) {
    const V bits = upper_bf16_of_bits(hn::BitCast(U32(), values));
    return hn::BitCast(F32(), hn::And(bits, all(0xffff0000u)));
  } else {
    return values;
  }
}

// Returns F8_E4M3 codes; too large values get the code of the largest value. Not for NaNs.
HWY_INLINE V e4m3_of_bits(V bits) {
  const V sign = hn::And(hn::ShiftRight<24>(bits), all(0x80));
  const V magnitude = hn::Min(hn::And(bits, all(0x7fffffffu)), all(0x43e00000u));  // 448
  const V odd = hn::And(hn::ShiftRight<20>(magnitude), all(1));
  const V normal = hn::ShiftRight<20>(
      hn::Add(magnitude, hn::Add(odd, all(0x7ffffu - (120u << 23)))));  // wraps on purpose
  // Adding 2^14 rounds subnormals to steps of 2^-9, ties to even.
  const V base = all(141u << 23);
  const V subnormal = hn::Sub(
      hn::BitCast(U32(), hn::Add(hn::BitCast(F32(), magnitude), hn::BitCast(F32(), base))), base);
  return hn::Or(sign, where_greater(all(121u << 23), magnitude, subnormal, normal));
}

// Returns the values of F8_E4M3 codes without sign, except NaN.
HWY_INLINE VF positive_of_e4m3(V codes) {
  const V shifted = hn::ShiftLeft<20>(codes);
  const V base = all(121u << 23);  // 2^-6
  const V subnormal = subtract_floats(hn::Add(shifted, base), base);
  return hn::BitCast(F32(),
                     where_greater(all(8), codes, subnormal, hn::Add(shifted, all(120u << 23))));
}

// Returns E2M1 codes without sign: the nearest, ties to even; too large values become 6.
HWY_INLINE V e2m1_of_bits(V bits) {
  const V magnitude = hn::Min(hn::And(bits, all(0x7fffffffu)), all(0x40c00000u));  // 6
  const V odd = hn::And(hn::ShiftRight<22>(magnitude), all(1));
  const V normal = hn::ShiftRight<22>(
      hn::Add(magnitude, hn::Add(odd, all(0x1fffffu - (126u << 23)))));  // wraps on purpose
  // Adding 2^22 rounds values below 1 to steps of 1/2, ties to even.
  const V base = all(149u << 23);
  const V small = hn::Sub(
      hn::BitCast(U32(), hn::Add(hn::BitCast(F32(), magnitude), hn::BitCast(F32(), base))), base);
  return where_greater(all(127u << 23), magnitude, small, normal);
}

// Returns E2M1 codes without sign: the nearest, ties towards zero; too large values become 6.
HWY_INLINE V e2m1_half_down_of_bits(V bits) {
  const V magnitude = hn::Min(hn::And(bits, all(0x7fffffffu)), all(0x40c00000u));  // 6
  const V normal =
      hn::ShiftRight<22>(hn::Add(magnitude, all(0x1fffffu - (126u << 23))));  // wraps on purpose
  const V half = where_greater(magnitude, all(0x3e800000u), all(1), all(0));  // 0.25
  const V small = where_greater(magnitude, all(0x3f400000u), all(2), half);   // 0.75
  return where_greater(all(127u << 23), magnitude, small, normal);
}

// Clamps values to [-most, most - 1].
HWY_INLINE VF within(VF values, float most) {
  return hn::Min(hn::Max(values, hn::Set(F32(), -most)), hn::Set(F32(), most - 1));
}

using I8 = hn::Rebind<std::int8_t, F32>;
HWY_INLINE void write_i8(hn::Vec<I32> values, std::byte* to) {
  const hn::RebindToUnsigned<I8> d;
  store_bits(d, hn::BitCast(d, hn::DemoteTo(I8(), values)), to);
}
HWY_INLINE hn::Vec<I32> load_i8(const std::byte* from) {
  return hn::PromoteTo(I32(), hn::BitCast(I8(), load_bits(hn::RebindToUnsigned<I8>(), from)));
}

HWY_INLINE void write_u8(V values, std::byte* to) {
  store_bits(U8(), hn::DemoteTo(U8(), hn::BitCast(I32(), values)), to);
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
