// Helpers of encoders: reads values into vectors, finds the largest magnitude of a run, and stores
// values with NaNs. Included by files that Highway compiles once per instruction set.

#include <algorithm>
#include <bit>
#include <cassert>
#include <limits>
#include <type_traits>

#include "kernels/number.h"

#ifndef LOADSTONE_KERNELS_NUMBERS_INL_ONCE
#define LOADSTONE_KERNELS_NUMBERS_INL_ONCE

namespace loadstone::simd {

inline constexpr std::uint32_t infinity_bits = 0x7f800000u;
inline constexpr std::uint32_t quiet_nan_bits = 0x7fc00000u;

inline bool is_finite_number(float value) noexcept {
  return (std::bit_cast<std::uint32_t>(value) & infinity_bits) != infinity_bits;
}

// Casts a value to the target and stores it. Every NaN becomes the quiet NaN with payload 0.
template <Dtype target>
inline void store_number(std::byte* to, float value) noexcept {
  if (value != value) value = std::bit_cast<float>(quiet_nan_bits);
  number::store<target>(to, value, number::bf16_nan_scalar);
}

// Calls `run` with the dtype of the plain values as a template argument. The dtype must be F32, F16
// or BF16.
template <class Run>
inline auto with_numbers(Dtype dtype, Run run) {
  if (dtype == Dtype::f32) return run.template operator()<Dtype::f32>();
  if (dtype == Dtype::f16) return run.template operator()<Dtype::f16>();
  assert(dtype == Dtype::bf16);
  return run.template operator()<Dtype::bf16>();
}

// Returns the F32 bits of a magnitude, which is given as the bits of `source`.
template <Dtype source>
inline std::uint32_t f32_of_magnitude(std::uint32_t magnitude) noexcept {
  if constexpr (source == Dtype::f16) {
    return number::f32_from_f16(static_cast<std::uint16_t>(magnitude));
  } else {
    return source == Dtype::bf16 ? magnitude << 16 : magnitude;
  }
}

// Returns the index of the first value for which `is_wrong` is true, or `count`.
template <Dtype source, class IsWrong>
inline std::uint64_t find_number(const std::byte* from, std::uint64_t count, IsWrong is_wrong) {
  std::uint64_t place = 0;
  while (place < count &&
         !is_wrong(number::load<source>(from + place * number::bytes_of<source>))) {
    ++place;
  }
  return place;
}

}  // namespace loadstone::simd
#endif

#if defined(LOADSTONE_KERNELS_NUMBERS_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOADSTONE_KERNELS_NUMBERS_INL_H
#undef LOADSTONE_KERNELS_NUMBERS_INL_H
#else
#define LOADSTONE_KERNELS_NUMBERS_INL_H
#endif

#include <hwy/highway.h>

#include "kernels/vector_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using VF = hn::Vec<F32>;

template <Dtype source>
HWY_INLINE VF load_numbers(const std::byte* from) {
  if constexpr (source == Dtype::f32) {
    return hn::BitCast(F32(), load_bits(U32(), from));
  } else {
    const V halves = hn::PromoteTo(U32(), load_bits(U16(), from));
    if constexpr (source == Dtype::f16) return hn::BitCast(F32(), bits_of_f16<false>(halves));
    return hn::BitCast(F32(), hn::ShiftLeft<16>(halves));
  }
}

// Rounds magnitudes below 65520 to the nearest F16, ties to even. Adds a float whose last bit has
// the value of the F16's last bit, and subtracts it again.
HWY_INLINE VF round_to_half(VF values) {
  const V exponent = hn::And(hn::BitCast(U32(), values), all(infinity_bits));
  const V least = hn::Max(exponent, all(113u << 23));  // 2^-14
  const VF large = hn::BitCast(F32(), hn::Add(least, all((13u << 23) | 0x400000u)));
  return hn::Sub(hn::Add(values, large), large);
}

// Loads two vectors: the values at even indices and those at odd indices.
template <Dtype source>
HWY_INLINE void load_pairs(const std::byte* from, VF& even, VF& odd) {
  const V first = load_bits(U32(), from);
  if constexpr (source == Dtype::f32) {
    const V second = load_bits(U32(), from + 4 * hn::Lanes(U32()));
#if HWY_TARGET == HWY_SCALAR
    even = hn::BitCast(F32(), first);
    odd = hn::BitCast(F32(), second);
#else
    even = hn::BitCast(F32(), hn::ConcatEven(U32(), second, first));
    odd = hn::BitCast(F32(), hn::ConcatOdd(U32(), second, first));
#endif
  } else if constexpr (source == Dtype::f16) {
    even = hn::BitCast(F32(), bits_of_f16<false>(hn::And(first, all(0xffff))));
    odd = hn::BitCast(F32(), bits_of_f16<false>(hn::ShiftRight<16>(first)));
  } else {
    even = hn::BitCast(F32(), hn::ShiftLeft<16>(first));
    odd = hn::BitCast(F32(), hn::And(first, all(0xffff0000u)));
  }
}

// Returns the largest magnitude as F32; a NaN counts as more than infinity. Compares the bits as
// integers, because they have the order of the magnitudes.
template <Dtype source>
HWY_INLINE float largest_magnitude(const std::byte* from, std::uint64_t count) {
  using Unsigned = std::conditional_t<source == Dtype::f32, std::uint32_t, std::uint16_t>;
  using Signed = std::make_signed_t<Unsigned>;
  constexpr std::size_t bytes = sizeof(Signed);
  const hn::CappedTag<Signed, 64 / bytes> d;
  const hn::RebindToUnsigned<decltype(d)> d_unsigned;
  const auto sign_off = hn::Set(d, std::numeric_limits<Signed>::max());
  const std::size_t lanes = hn::Lanes(d);
  auto most = hn::Zero(d);
  std::uint64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto bits = hn::BitCast(d, load_bits(d_unsigned, from + i * bytes));
    most = hn::Max(most, hn::And(bits, sign_off));
  }
  auto magnitude = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(d, most)));
  for (; i < count; ++i) {
    const auto bits = number::load_raw<Unsigned>(from + i * bytes);
    magnitude = std::max(magnitude, static_cast<std::uint32_t>(bits & Unsigned(-1) >> 1));
  }
  return std::bit_cast<float>(f32_of_magnitude<source>(magnitude));
}

// Like largest_magnitude(), for `count` values, a multiple of the vector size.
template <Dtype source, std::size_t count>
HWY_INLINE float largest_of(const std::byte* from) {
  using Unsigned = std::conditional_t<source == Dtype::f32, std::uint32_t, std::uint16_t>;
  using Signed = std::make_signed_t<Unsigned>;
  const hn::CappedTag<Signed, count> d;
  const hn::RebindToUnsigned<decltype(d)> d_unsigned;
  const auto sign_off = hn::Set(d, std::numeric_limits<Signed>::max());
  auto most = hn::Zero(d);
  for (std::size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto bits = hn::BitCast(d, load_bits(d_unsigned, from + i * sizeof(Signed)));
    most = hn::Max(most, hn::And(bits, sign_off));
  }
  const auto magnitude = static_cast<std::uint32_t>(hn::GetLane(hn::MaxOfLanes(d, most)));
  return std::bit_cast<float>(f32_of_magnitude<source>(magnitude));
}

template <Dtype target>
struct FiniteWriter;
template <>
struct FiniteWriter<Dtype::f32> : WriteF32 {};
template <>
struct FiniteWriter<Dtype::f16> : WriteF16 {};
template <>
struct FiniteWriter<Dtype::bf16> : WriteBf16<number::bf16_nan_scalar> {};

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
