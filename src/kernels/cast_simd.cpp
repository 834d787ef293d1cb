#include "kernels/cast_simd.h"

#include "kernels/number.h"

// Highway compiles this file once for each instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cast_simd.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h, as Highway demands.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::Rebind<std::uint32_t, F32>;
using I32 = hn::Rebind<std::int32_t, F32>;
using U16 = hn::Rebind<std::uint16_t, F32>;
using U8 = hn::Rebind<std::uint8_t, F32>;
using V = hn::Vec<U32>;  // all arithmetic is on the bits, so every instruction set gives the same

// As bytes, because nothing says that tensors in a file are aligned. The scalar target, of one
// lane, has no vector of bytes.
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

// `yes` where a > b, both below 2^31.
HWY_INLINE V where_greater(V a, V b, V yes, V no) {
  const auto mask = hn::Gt(hn::BitCast(I32(), a), hn::BitCast(I32(), b));
  return hn::IfThenElse(hn::RebindMask(U32(), mask), yes, no);
}

// (a as float) - (b as float), where the result is exact.
HWY_INLINE V subtract_floats(V a, V b) {
  return hn::BitCast(U32(), hn::Sub(hn::BitCast(F32(), a), hn::BitCast(F32(), b)));
}

HWY_INLINE V bits_of_f16(V half) {
  const V magnitude = hn::And(half, all(0x7fff));
  const V sign = hn::ShiftLeft<16>(hn::And(half, all(0x8000)));
  const V shifted = hn::ShiftLeft<13>(magnitude);
  // Subnormal: 2^-14 + the value, less 2^-14.
  const V base = all(113u << 23);
  V result = where_greater(all(0x400), magnitude, subtract_floats(hn::Add(shifted, base), base),
                           hn::Add(shifted, all(112u << 23)));
  result = where_greater(magnitude, all(0x7bff), hn::Or(shifted, all(0x7f800000)), result);
  result = where_greater(magnitude, all(0x7c00), hn::Or(result, all(0x400000)), result);
  return hn::Or(result, sign);
}

HWY_INLINE V f16_of_bits(V bits) {
  const V magnitude = hn::And(bits, all(0x7fffffff));
  const V sign = hn::And(hn::ShiftRight<16>(bits), all(0x8000));
  const V odd = hn::And(hn::ShiftRight<13>(magnitude), all(1));
  const V normal = hn::ShiftRight<13>(
      hn::Add(magnitude, hn::Add(odd, all(0xfffu - (112u << 23)))));  // wraps on purpose
  // Subnormal: the sum with 0.5 rounds to steps of 2^-24, to nearest even.
  const V half = all(126u << 23);
  const V subnormal = hn::Sub(
      hn::BitCast(U32(), hn::Add(hn::BitCast(F32(), magnitude), hn::BitCast(F32(), half))), half);
  V result = where_greater(all(0x38800000), magnitude, subnormal, normal);
  result = where_greater(magnitude, all(0x477fffff), all(0x7c00), result);
  const V nan = hn::Or(all(0x7e00), hn::And(hn::ShiftRight<13>(magnitude), all(0x3ff)));
  result = where_greater(magnitude, all(0x7f800000), nan, result);
  return hn::Or(result, sign);
}

HWY_INLINE V bf16_of_bits(V bits, V nan) {
  const V magnitude = hn::And(bits, all(0x7fffffff));
  const V odd = hn::And(hn::ShiftRight<16>(bits), all(1));
  const V rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, all(0x7fff))));
  return where_greater(magnitude, all(0x7f800000), nan, rounded);
}

HWY_INLINE V bits_of_f8_e4m3(V byte) {
  const V magnitude = hn::And(byte, all(0x7f));
  const V sign = hn::ShiftLeft<24>(hn::And(byte, all(0x80)));
  const V shifted = hn::ShiftLeft<20>(magnitude);
  const V base = all(121u << 23);  // as for f16: 2^-6
  V result = where_greater(all(8), magnitude, subtract_floats(hn::Add(shifted, base), base),
                           hn::Add(shifted, all(120u << 23)));
  result = where_greater(magnitude, all(0x7e), all(0x7ff00000), result);
  return hn::Or(result, sign);
}

// ---- one vector's worth: bytes to bits, and back

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

struct WriteF32 {
  static constexpr std::size_t bytes = 4;
  static HWY_INLINE void write(V bits, std::byte* to) { store_bits(U32(), bits, to); }
};
HWY_INLINE void write_u16(V values, std::byte* to) {
  store_bits(U16(), hn::DemoteTo(U16(), hn::BitCast(I32(), values)), to);
}
struct WriteF16 {
  static constexpr std::size_t bytes = 2;
  static HWY_INLINE void write(V bits, std::byte* to) { write_u16(f16_of_bits(bits), to); }
};
template <std::uint16_t nan>
struct WriteBf16 {
  static constexpr std::size_t bytes = 2;
  static HWY_INLINE void write(V bits, std::byte* to) {
    write_u16(bf16_of_bits(bits, all(nan)), to);
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

void F32FromBf16(const std::byte* from, std::byte* to, std::uint64_t count) {
  convert_all<ReadBf16, WriteF32, Dtype::bf16, Dtype::f32>(from, to, count);
}
void F32FromF16(const std::byte* from, std::byte* to, std::uint64_t count) {
  convert_all<ReadF16, WriteF32, Dtype::f16, Dtype::f32>(from, to, count);
}
void Bf16FromF32(const std::byte* from, std::byte* to, std::uint64_t count) {
  convert_all<ReadF32, WriteBf16<number::bf16_nan_vector>, Dtype::f32, Dtype::bf16>(from, to,
                                                                                    count);
}
void F16FromF32(const std::byte* from, std::byte* to, std::uint64_t count) {
  convert_all<ReadF32, WriteF16, Dtype::f32, Dtype::f16>(from, to, count);
}
void F16FromBf16(const std::byte* from, std::byte* to, std::uint64_t count) {
  convert_all<ReadBf16, WriteF16, Dtype::bf16, Dtype::f16>(from, to, count);
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
void bf16_from_f32(const std::byte* source, std::byte* target, std::uint64_t count) noexcept {
  HWY_DYNAMIC_DISPATCH(Bf16FromF32)(source, target, count);
}
void f16_from_f32(const std::byte* source, std::byte* target, std::uint64_t count) noexcept {
  HWY_DYNAMIC_DISPATCH(F16FromF32)(source, target, count);
}
void f16_from_bf16(const std::byte* source, std::byte* target, std::uint64_t count) noexcept {
  HWY_DYNAMIC_DISPATCH(F16FromBf16)(source, target, count);
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
