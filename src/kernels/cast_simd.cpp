#include "kernels/cast_simd.h"

#include <bit>

#include "kernels/number.h"
#include "kernels/overflow_inl.h"

// Highway compiles this file once for each instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cast_simd.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/vector_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE V bits_of_f8_e4m3(V byte) {
  const V magnitude = hn::And(byte, all(0x7f));
  const V sign = hn::ShiftLeft<24>(hn::And(byte, all(0x80)));
  const V shifted = hn::ShiftLeft<20>(magnitude);
  const V base = all(121u << 23);  // 2^-6, the smallest normal value
  V result = where_greater(all(8), magnitude, subtract_floats(hn::Add(shifted, base), base),
                           hn::Add(shifted, all(120u << 23)));
  result = where_greater(magnitude, all(0x7e), all(0x7ff00000), result);
  return hn::Or(result, sign);
}

// ---- Reads one vector of elements, as the bits of F32

struct ReadF32 {
  static constexpr std::size_t bytes = 4;
  static HWY_INLINE V read(const std::byte* from) { return load_bits(U32(), from); }
};
struct ReadBf16 {
  static constexpr std::size_t bytes = 2;
  static HWY_INLINE V read(const std::byte* from) {
    return hn::ShiftLeft<16>(hn::PromoteTo(U32(), load_bits(U16(), from)));
  }
};
struct ReadF16 {
  static constexpr std::size_t bytes = 2;
  static HWY_INLINE V read(const std::byte* from) {
    return bits_of_f16(hn::PromoteTo(U32(), load_bits(U16(), from)));
  }
};
struct ReadF8E4m3 {
  static constexpr std::size_t bytes = 1;
  static HWY_INLINE V read(const std::byte* from) {
    return bits_of_f8_e4m3(hn::PromoteTo(U32(), load_bits(U8(), from)));
  }
};

template <class Read, class Write, Dtype source, Dtype target>
HWY_INLINE void convert_all(const std::byte* from, std::byte* to, std::uint64_t count) {
  const std::size_t lanes = hn::Lanes(U32());
  std::uint64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    Write::write(Read::read(from + i * Read::bytes), to + i * Write::bytes);
  }
  for (; i < count; ++i) {
    number::convert<source, target>(from + i * Read::bytes, to + i * Write::bytes);
  }
}

// Converts values. Returns true if one of them is too large for the target, or non-finite.
template <class Read, class Write, Dtype source, Dtype target>
HWY_INLINE bool convert_watched(const std::byte* from, std::byte* to, std::uint64_t count) {
  constexpr auto limit = static_cast<std::uint32_t>(overflow::first_beyond(Dtype::f32, target));
  const std::size_t lanes = hn::Lanes(U32());
  const I32 signed_lanes;  // safe for magnitudes, because their sign bit is 0
  auto most = hn::Zero(signed_lanes);
  std::uint64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const V bits = Read::read(from + i * Read::bytes);
    most = hn::Max(most, hn::BitCast(signed_lanes, hn::And(bits, all(0x7fffffffu))));
    Write::write(bits, to + i * Write::bytes);
  }
  const auto below = hn::Set(signed_lanes, static_cast<std::int32_t>(limit - 1));
  bool is_beyond = !hn::AllFalse(signed_lanes, hn::Gt(most, below));
  for (; i < count; ++i) {
    const float value = number::load<source>(from + i * Read::bytes);
    is_beyond = is_beyond || (std::bit_cast<std::uint32_t>(value) & 0x7fffffffu) >= limit;
    number::convert<source, target>(from + i * Read::bytes, to + i * Write::bytes);
  }
  return is_beyond;
}

void F32FromBf16(const std::byte* from, std::byte* to, std::uint64_t count) {
  convert_all<ReadBf16, WriteF32, Dtype::bf16, Dtype::f32>(from, to, count);
}
void F32FromF16(const std::byte* from, std::byte* to, std::uint64_t count) {
  convert_all<ReadF16, WriteF32, Dtype::f16, Dtype::f32>(from, to, count);
}
bool Bf16FromF32(const std::byte* from, std::byte* to, std::uint64_t count) {
  return convert_watched<ReadF32, WriteBf16<number::bf16_nan_vector>, Dtype::f32, Dtype::bf16>(
      from, to, count);
}
bool F16FromF32(const std::byte* from, std::byte* to, std::uint64_t count) {
  return convert_watched<ReadF32, WriteF16, Dtype::f32, Dtype::f16>(from, to, count);
}
bool F16FromBf16(const std::byte* from, std::byte* to, std::uint64_t count) {
  return convert_watched<ReadBf16, WriteF16, Dtype::bf16, Dtype::f16>(from, to, count);
}
void Bf16FromF16(const std::byte* from, std::byte* to, std::uint64_t count) {
  convert_all<ReadF16, WriteBf16<number::bf16_nan_scalar>, Dtype::f16, Dtype::bf16>(from, to,
                                                                                    count);
}
void F32FromF8E4m3(const std::byte* from, std::byte* to, std::uint64_t count) {
  convert_all<ReadF8E4m3, WriteF32, Dtype::f8_e4m3, Dtype::f32>(from, to, count);
}
void Bf16FromF8E4m3(const std::byte* from, std::byte* to, std::uint64_t count) {
  convert_all<ReadF8E4m3, WriteBf16<number::bf16_nan_scalar>, Dtype::f8_e4m3, Dtype::bf16>(from, to,
                                                                                           count);
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(F32FromBf16);
HWY_EXPORT(F32FromF16);
HWY_EXPORT(Bf16FromF32);
HWY_EXPORT(F16FromF32);
HWY_EXPORT(F16FromBf16);
HWY_EXPORT(Bf16FromF16);
HWY_EXPORT(F32FromF8E4m3);
HWY_EXPORT(Bf16FromF8E4m3);

void f32_from_bf16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept {
  HWY_DYNAMIC_DISPATCH(F32FromBf16)(source, target, count);
}
void f32_from_f16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept {
  HWY_DYNAMIC_DISPATCH(F32FromF16)(source, target, count);
}
bool bf16_from_f32(const std::byte* source, std::byte* target, std::uint64_t count) noexcept {
  return HWY_DYNAMIC_DISPATCH(Bf16FromF32)(source, target, count);
}
bool f16_from_f32(const std::byte* source, std::byte* target, std::uint64_t count) noexcept {
  return HWY_DYNAMIC_DISPATCH(F16FromF32)(source, target, count);
}
bool f16_from_bf16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept {
  return HWY_DYNAMIC_DISPATCH(F16FromBf16)(source, target, count);
}
void bf16_from_f16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept {
  HWY_DYNAMIC_DISPATCH(Bf16FromF16)(source, target, count);
}
void f32_from_f8_e4m3(const std::byte* source, std::byte* target, std::uint64_t count) noexcept {
  HWY_DYNAMIC_DISPATCH(F32FromF8E4m3)(source, target, count);
}
void bf16_from_f8_e4m3(const std::byte* source, std::byte* target, std::uint64_t count) noexcept {
  HWY_DYNAMIC_DISPATCH(Bf16FromF8E4m3)(source, target, count);
}

}  // namespace loadstone::simd
#endif
