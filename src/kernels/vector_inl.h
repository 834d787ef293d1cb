// Helpers of kernels: converts bits of floats in vectors, and loads and stores unaligned vectors.
// Included after highway.h by files that Highway compiles once per instruction set.

#include "kernels/number.h"

#if defined(LOADSTONE_KERNELS_VECTOR_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOADSTONE_KERNELS_VECTOR_INL_H
#undef LOADSTONE_KERNELS_VECTOR_INL_H
#else
#define LOADSTONE_KERNELS_VECTOR_INL_H
#endif

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Has at most 16 lanes, the size of the smallest group of values that share a scale.
using F32 = hn::CappedTag<float, 16>;
using U32 = hn::Rebind<std::uint32_t, F32>;
using I32 = hn::Rebind<std::int32_t, F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using U8 = hn::Rebind<std::uint8_t, F32>;
using V = hn::Vec<U32>;  // floats as bits: integer operations give the same bits everywhere

// Loads a vector as bytes, because tensors in a file may be unaligned. The scalar target cannot do
// this: it has only one lane, so a vector of bytes is too small.
template <class D>
HWY_INLINE hn::Vec<D> load_bits(D d, const std::byte* from) {
  if constexpr (HWY_TARGET == HWY_SCALAR) {
    return hn::Set(d, number::load_raw<hn::TFromD<D>>(from));
  } else {
    const hn::Repartition<std::uint8_t, D> bytes;
    return hn::BitCast(d, hn::LoadU(bytes, reinterpret_cast<const std::uint8_t*>(from)));
  }
}

template <class D>
HWY_INLINE void store_bits([[maybe_unused]] D d, hn::Vec<D> value, std::byte* to) {
  if constexpr (HWY_TARGET == HWY_SCALAR) {
    number::store_raw(to, hn::GetLane(value));
  } else {
    const hn::Repartition<std::uint8_t, D> bytes;
    hn::StoreU(hn::BitCast(bytes, value), bytes, reinterpret_cast<std::uint8_t*>(to));
  }
}

HWY_INLINE V all(std::uint32_t bits) { return hn::Set(U32(), bits); }

// Returns `yes` in lanes where a > b, otherwise `no`. Both a and b must be below 2^31.
HWY_INLINE V where_greater(V a, V b, V yes, V no) {
  const auto mask = hn::Gt(hn::BitCast(I32(), a), hn::BitCast(I32(), b));
  return hn::IfThenElse(hn::RebindMask(U32(), mask), yes, no);
}

// Returns (a as float) - (b as float) as bits. The result must be exact.
HWY_INLINE V subtract_floats(V a, V b) {
  return hn::BitCast(U32(), hn::Sub(hn::BitCast(F32(), a), hn::BitCast(F32(), b)));
}

// Converts the bits of F16 to the bits of F32. Without `may_be_nan`, the result for a NaN is wrong.
template <bool may_be_nan = true>
HWY_INLINE V bits_of_f16(V half) {
  const V magnitude = hn::And(half, all(0x7fff));
  const V sign = hn::ShiftLeft<16>(hn::And(half, all(0x8000)));
  const V shifted = hn::ShiftLeft<13>(magnitude);
  // Converts subnormals: adds the value to 2^-14, then subtracts 2^-14.
  const V base = all(113u << 23);
  V result = where_greater(all(0x400), magnitude, subtract_floats(hn::Add(shifted, base), base),
                           hn::Add(shifted, all(112u << 23)));
  result = where_greater(magnitude, all(0x7bff), hn::Or(shifted, all(0x7f800000)), result);
  if constexpr (may_be_nan) {
    result = where_greater(magnitude, all(0x7c00), hn::Or(result, all(0x400000)), result);
  }
  return hn::Or(result, sign);
}

template <bool may_be_nan = true>
HWY_INLINE V f16_of_bits(V bits) {
  const V magnitude = hn::And(bits, all(0x7fffffff));
  const V sign = hn::And(hn::ShiftRight<16>(bits), all(0x8000));
  const V odd = hn::And(hn::ShiftRight<13>(magnitude), all(1));
  const V normal = hn::ShiftRight<13>(
      hn::Add(magnitude, hn::Add(odd, all(0xfffu - (112u << 23)))));  // wraps on purpose
  // Adding 0.5 rounds subnormals to steps of 2^-24, ties to even.
  const V half = all(126u << 23);
  const V subnormal = hn::Sub(
      hn::BitCast(U32(), hn::Add(hn::BitCast(F32(), magnitude), hn::BitCast(F32(), half))), half);
  V result = where_greater(all(0x38800000), magnitude, subnormal, normal);
  result = where_greater(magnitude, all(0x477fffff), all(0x7c00), result);
  if constexpr (may_be_nan) {
    const V nan = hn::Or(all(0x7e00), hn::And(hn::ShiftRight<13>(magnitude), all(0x3ff)));
    result = where_greater(magnitude, all(0x7f800000), nan, result);
  }
  return hn::Or(result, sign);
}

// Rounds to BF16 in the upper half of each lane. The lower half contains leftover bits. Not for
// NaNs.
HWY_INLINE V upper_bf16_of_bits(V bits) {
  const V odd = hn::And(hn::ShiftRight<16>(bits), all(1));
  return hn::Add(bits, hn::Add(odd, all(0x7fff)));
}

HWY_INLINE V bf16_of_bits(V bits, V nan) {
  const V magnitude = hn::And(bits, all(0x7fffffff));
  const V rounded = hn::ShiftRight<16>(upper_bf16_of_bits(bits));
  return where_greater(magnitude, all(0x7f800000), nan, rounded);
}

// ---- Storing bits as elements of a dtype. write_two() supports no NaNs

struct WriteF32 {
  static constexpr std::size_t bytes = 4;
  static HWY_INLINE void write(V bits, std::byte* to) { store_bits(U32(), bits, to); }
  static HWY_INLINE void write_two(V first, V second, std::byte* to) {
    write(first, to);
    write(second, to + hn::Lanes(U32()) * bytes);
  }
};
HWY_INLINE void write_u16(V values, std::byte* to) {
  store_bits(U16(), hn::DemoteTo(U16(), hn::BitCast(I32(), values)), to);
}
struct WriteF16 {
  static constexpr std::size_t bytes = 2;
  static HWY_INLINE void write(V bits, std::byte* to) { write_u16(f16_of_bits(bits), to); }
  static HWY_INLINE void write_two(V first, V second, std::byte* to) {
    write_u16(f16_of_bits<false>(first), to);
    write_u16(f16_of_bits<false>(second), to + hn::Lanes(U32()) * bytes);
  }
};
template <std::uint16_t nan>
struct WriteBf16 {
  static constexpr std::size_t bytes = 2;
  static HWY_INLINE void write(V bits, std::byte* to) {
    write_u16(bf16_of_bits(bits, all(nan)), to);
  }
  static HWY_INLINE void write_two(V first, V second, std::byte* to) {
#if HWY_TARGET == HWY_SCALAR
    store_bits(U16(), hn::Set(U16(), upper_half(first)), to);
    store_bits(U16(), hn::Set(U16(), upper_half(second)), to + bytes);
#else
    const hn::Repartition<std::uint16_t, U32> halves;
    const auto low = hn::BitCast(halves, upper_bf16_of_bits(first));
    const auto high = hn::BitCast(halves, upper_bf16_of_bits(second));
    store_bits(halves, hn::ConcatOdd(halves, high, low), to);
#endif
  }

 private:
  static HWY_INLINE std::uint16_t upper_half(V bits) {
    return static_cast<std::uint16_t>(hn::GetLane(upper_bf16_of_bits(bits)) >> 16);
  }
};

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
