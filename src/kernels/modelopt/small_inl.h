// Small floats in vectors, and quotients rounded as ModelOpt rounds them. For files that Highway
// compiles once for each instruction set.

#include "kernels/numbers_inl.h"

#if defined(LOADSTONE_KERNELS_MODELOPT_SMALL_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOADSTONE_KERNELS_MODELOPT_SMALL_INL_H
#undef LOADSTONE_KERNELS_MODELOPT_SMALL_INL_H
#else
#define LOADSTONE_KERNELS_MODELOPT_SMALL_INL_H
#endif

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

// To the nearest number of `source`, ties to even. What no code is as large as may stay so.
template <Dtype source>
HWY_INLINE VF round_to(VF values) {
  if constexpr (source == Dtype::f16) {
    const VF most = hn::Set(F32(), 32768.0f);
    return round_to_half(hn::Min(hn::Max(values, hn::Neg(most)), most));
  } else if constexpr (source == Dtype::bf16) {
    const V bits = upper_bf16_of_bits(hn::BitCast(U32(), values));
    return hn::BitCast(F32(), hn::And(bits, all(0xffff0000u)));
  } else {
    return values;
  }
}

// The codes of F8_E4M3, which saturates. Not for NaN.
HWY_INLINE V e4m3_of_bits(V bits) {
  const V sign = hn::And(hn::ShiftRight<24>(bits), all(0x80));
  const V magnitude = hn::Min(hn::And(bits, all(0x7fffffffu)), all(0x43e00000u));  // 448
  const V odd = hn::And(hn::ShiftRight<20>(magnitude), all(1));
  const V normal = hn::ShiftRight<20>(
      hn::Add(magnitude, hn::Add(odd, all(0x7ffffu - (120u << 23)))));  // wraps on purpose
  // Subnormal: the sum with 2^14 rounds to steps of 2^-9, to nearest even.
  const V base = all(141u << 23);
  const V subnormal = hn::Sub(
      hn::BitCast(U32(), hn::Add(hn::BitCast(F32(), magnitude), hn::BitCast(F32(), base))), base);
  return hn::Or(sign, where_greater(all(121u << 23), magnitude, subnormal, normal));
}

// The numbers of codes of F8_E4M3 without sign, but for NaN's.
HWY_INLINE VF positive_of_e4m3(V codes) {
  const V shifted = hn::ShiftLeft<20>(codes);
  const V base = all(121u << 23);  // 2^-6
  const V subnormal = subtract_floats(hn::Add(shifted, base), base);
  return hn::BitCast(F32(),
                     where_greater(all(8), codes, subnormal, hn::Add(shifted, all(120u << 23))));
}

// The codes of E2M1 without the sign: to nearest, ties to even, saturating.
HWY_INLINE V e2m1_of_bits(V bits) {
  const V magnitude = hn::Min(hn::And(bits, all(0x7fffffffu)), all(0x40c00000u));  // 6
  const V odd = hn::And(hn::ShiftRight<22>(magnitude), all(1));
  const V normal = hn::ShiftRight<22>(
      hn::Add(magnitude, hn::Add(odd, all(0x1fffffu - (126u << 23)))));  // wraps on purpose
  // Below 1: the sum with 2^22 rounds to steps of 1/2.
  const V base = all(149u << 23);
  const V small = hn::Sub(
      hn::BitCast(U32(), hn::Add(hn::BitCast(F32(), magnitude), hn::BitCast(F32(), base))), base);
  return where_greater(all(127u << 23), magnitude, small, normal);
}

HWY_INLINE void write_u8(V values, std::byte* to) {
  store_bits(U8(), hn::DemoteTo(U8(), hn::BitCast(I32(), values)), to);
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
