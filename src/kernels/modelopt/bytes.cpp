// Encodes and decodes 8-bit codes with separate scales, F8_E4M3 and I8. Finds the largest
// magnitudes, which determine scales.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/modelopt.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/modelopt/bytes.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/modelopt/small_inl.h"
#include "kernels/numbers_inl.h"

#ifndef LOADSTONE_KERNELS_MODELOPT_BYTES_ONCE
#define LOADSTONE_KERNELS_MODELOPT_BYTES_ONCE

namespace loadstone::simd {

// Encodes one quotient, finite or not.
template <bool is_int8>
void store_code(float value, std::byte* to) noexcept {
  if constexpr (is_int8) {
    const float limited = std::min(std::max(value, -128.0f), 127.0f);
    const float whole = value != value ? 0.0f : std::nearbyint(limited);
    number::store_raw(to, static_cast<std::int8_t>(whole));
  } else {
    number::store<Dtype::f8_e4m3>(to, value, 0);
  }
}

// Encodes one value at a time, for runs with NaNs.
template <Dtype source, bool is_int8, bool rounds>
void encode_bytes_plainly(float scale, const std::byte* from, std::uint64_t count,
                          std::byte* to) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) {
    float value = number::load<source>(from + i * number::bytes_of<source>) / scale;
    if constexpr (rounds) {
      std::array<std::byte, number::bytes_of<source>> rounded;
      store_number<source>(rounded.data(), value);
      value = number::load<source>(rounded.data());
    }
    store_code<is_int8>(value, to + i);
  }
}

}  // namespace loadstone::simd
#endif

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {
namespace {

// Number of values that are first examined and then encoded, while they are still in the L1 cache.
constexpr std::uint64_t stretch = 4096;

template <Dtype source, bool is_int8, bool rounds>
HWY_INLINE void encode_vector(VF scales, const std::byte* from, std::byte* to) {
  VF values = hn::Div(load_numbers<source>(from), scales);
  if constexpr (rounds) values = round_to<source>(values);
  if constexpr (is_int8) {
    write_i8(hn::NearestInt(within(values, 128.0f)), to);
  } else {
    write_u8(e4m3_of_bits(hn::BitCast(U32(), values)), to);
  }
}

template <Dtype source, bool is_int8, bool rounds>
HWY_INLINE void encode_stretch(float scale, const std::byte* from, std::uint64_t count,
                               std::byte* to) {
  constexpr std::size_t bytes = number::bytes_of<source>;
  const std::size_t lanes = hn::Lanes(F32());
  const VF scales = hn::Set(F32(), scale);
  std::uint64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    encode_vector<source, is_int8, rounds>(scales, from + i * bytes, to + i);
  }
  if (i == count) return;
  encode_bytes_plainly<source, is_int8, rounds>(scale, from + i * bytes, count - i, to + i);
}

template <Dtype source, bool is_int8, bool rounds>
std::uint64_t encode_run(float scale, const std::byte* from, std::uint64_t count, std::byte* to) {
  std::uint64_t first_wrong = count;
  for (std::uint64_t at = 0; at < count; at += stretch) {
    const std::uint64_t size = std::min(stretch, count - at);
    const std::byte* const numbers = from + at * number::bytes_of<source>;
    if (HWY_LIKELY(is_finite_number(largest_magnitude<source>(numbers, size)))) {
      encode_stretch<source, is_int8, rounds>(scale, numbers, size, to + at);
      continue;
    }
    encode_bytes_plainly<source, is_int8, rounds>(scale, numbers, size, to + at);
    if (first_wrong == count) first_wrong = at + find_not_finite<source>(numbers, size);
  }
  return first_wrong;
}

template <Dtype source>
std::uint64_t encode_as(const ScaledRun& run, const std::byte* from, std::uint64_t count,
                        std::byte* to) {
  // For F32, rounding the quotient to the source's dtype changes nothing.
  if (run.rounds && source != Dtype::f32) {
    return run.is_int8 ? encode_run<source, true, true>(run.scale, from, count, to)
                       : encode_run<source, false, true>(run.scale, from, count, to);
  }
  return run.is_int8 ? encode_run<source, true, false>(run.scale, from, count, to)
                     : encode_run<source, false, false>(run.scale, from, count, to);
}

std::uint64_t Encode(const ScaledRun& run, const std::byte* from, std::uint64_t count,
                     std::byte* to) {
  return with_numbers(run.source,
                      [&]<Dtype dtype>() { return encode_as<dtype>(run, from, count, to); });
}

// ---- mxfp8: blocks of 32 with a power-of-two scale each

template <Dtype source>
std::uint64_t encode_mx_row(bool is_rounded_log, const std::byte* from, std::uint64_t columns,
                            std::byte* to, std::byte* scales) {
  std::uint64_t first_wrong = columns;
  for (std::uint64_t at = 0; at < columns; at += mx_block) {
    const std::uint64_t size = std::min<std::uint64_t>(mx_block, columns - at);
    const std::byte* numbers = from + at * number::bytes_of<source>;
    float most = size == mx_block ? largest_of<source, mx_block>(numbers)
                                  : largest_magnitude<source>(numbers, size);
    const bool is_wrong = !is_finite_number(most);
    if (HWY_UNLIKELY(is_wrong)) {
      most = finite_magnitude<source>(numbers, size);
      if (first_wrong == columns) first_wrong = at + find_not_finite<source>(numbers, size);
    }
    const std::uint32_t exponent = mx_exponent<MxType::mxfp8>(most, is_rounded_log);
    scales[at / mx_block] = static_cast<std::byte>(exponent);
    const float factor = one_by_power(exponent);
    std::array<std::byte, mx_block * number::bytes_of<source>> limited;
    constexpr MxTop top = mx_top<MxType::mxfp8>(source);
    if (HWY_UNLIKELY(exponent >= top.exponent)) {
      limit_magnitudes<source>(top.largest, numbers, size, limited.data());
      numbers = limited.data();
    }
    if (HWY_UNLIKELY(is_wrong || size < mx_block)) {
      encode_bytes_plainly<source, false, false>(1.0f / factor, numbers, size, to + at);
      continue;
    }
    const VF factors = hn::Set(F32(), factor);
    for (std::size_t i = 0; i < mx_block; i += hn::Lanes(F32())) {
      const VF values =
          hn::Mul(load_numbers<source>(numbers + i * number::bytes_of<source>), factors);
      write_u8(e4m3_of_bits(hn::BitCast(U32(), values)), to + at + i);
    }
  }
  return first_wrong;
}

std::uint64_t EncodeMx(Dtype source, bool is_rounded_log, const std::byte* from,
                       std::uint64_t columns, std::byte* to, std::byte* scales) {
  return with_numbers(source, [&]<Dtype dtype>() {
    return encode_mx_row<dtype>(is_rounded_log, from, columns, to, scales);
  });
}

// ---- Largest finite magnitudes

template <Dtype source>
std::uint64_t join_run(const std::byte* from, std::uint64_t count, float& amax) {
  std::uint64_t first_wrong = count;
  for (std::uint64_t at = 0; at < count; at += stretch) {
    const std::uint64_t size = std::min(stretch, count - at);
    const std::byte* const numbers = from + at * number::bytes_of<source>;
    float most = largest_magnitude<source>(numbers, size);
    if (HWY_UNLIKELY(!is_finite_number(most))) {
      most = finite_magnitude<source>(numbers, size);
      if (first_wrong == count) first_wrong = at + find_not_finite<source>(numbers, size);
    }
    amax = std::max(amax, most);
  }
  return first_wrong;
}

std::uint64_t Join(Dtype source, const std::byte* from, std::uint64_t count, float& amax) {
  return with_numbers(source, [&]<Dtype dtype>() { return join_run<dtype>(from, count, amax); });
}

// ---- decoding

template <bool is_int8>
HWY_INLINE VF decode_vector(VF scales, const std::byte* from) {
  if constexpr (is_int8) {
    return hn::Mul(hn::ConvertTo(F32(), load_i8(from)), scales);
  } else {
    const V bytes = hn::PromoteTo(U32(), load_bits(U8(), from));
    const V codes = hn::And(bytes, all(0x7f));
    const V sign = hn::ShiftLeft<24>(hn::And(bytes, all(0x80)));
    const V bits = hn::BitCast(U32(), positive_of_e4m3(codes));
    const V known = where_greater(codes, all(0x7e), all(quiet_nan_bits), bits);
    return hn::Mul(hn::BitCast(F32(), hn::Or(known, sign)), scales);
  }
}

template <Dtype target, bool is_int8>
void decode_run(float scale, const std::byte* from, std::uint64_t count, std::byte* to) {
  using Write = FiniteWriter<target>;
  const std::size_t lanes = hn::Lanes(F32());
  const VF scales = hn::Set(F32(), scale);
  std::uint64_t i = 0;
  const auto plain = all(quiet_nan_bits);
  for (; i < count; i += lanes) {
    const auto size = static_cast<std::size_t>(std::min<std::uint64_t>(lanes, count - i));
    std::array<std::byte, 16> last{};
    if (size < lanes) std::memcpy(last.data(), from + i, size);
    const VF values = decode_vector<is_int8>(scales, size < lanes ? last.data() : from + i);
    // Replaces each NaN by the default one, because its bits may depend on the instruction set.
    const auto is_nan = hn::RebindMask(U32(), hn::Ne(values, values));
    const V bits = hn::IfThenElse(is_nan, plain, hn::BitCast(U32(), values));
    if (size == lanes) {
      Write::write(bits, to + i * Write::bytes);
      continue;
    }
    std::array<std::byte, 16 * Write::bytes> numbers;
    Write::write(bits, numbers.data());
    std::memcpy(to + i * Write::bytes, numbers.data(), size * Write::bytes);
  }
}

template <Dtype target>
void decode_as(bool is_int8, float scale, const std::byte* from, std::uint64_t count,
               std::byte* to) {
  return is_int8 ? decode_run<target, true>(scale, from, count, to)
                 : decode_run<target, false>(scale, from, count, to);
}

void Decode(bool is_int8, float scale, const std::byte* from, std::uint64_t count, Dtype target,
            std::byte* to) {
  return with_numbers(
      target, [&]<Dtype dtype>() { return decode_as<dtype>(is_int8, scale, from, count, to); });
}

}  // namespace
}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(Encode);
HWY_EXPORT(EncodeMx);
HWY_EXPORT(Join);
HWY_EXPORT(Decode);

// HWY_DYNAMIC_DISPATCH finds Encode only in this namespace.
std::uint64_t encode_scaled(const ScaledRun& run, const std::byte* numbers, std::uint64_t count,
                            std::byte* data) noexcept {
  return HWY_DYNAMIC_DISPATCH(Encode)(run, numbers, count, data);
}

std::uint64_t encode_mx(Dtype source, bool is_rounded_log, const std::byte* numbers,
                        std::uint64_t columns, std::byte* data, std::byte* scales) noexcept {
  return HWY_DYNAMIC_DISPATCH(EncodeMx)(source, is_rounded_log, numbers, columns, data, scales);
}

std::uint64_t join(Dtype source, const std::byte* numbers, std::uint64_t count,
                   float& amax) noexcept {
  return HWY_DYNAMIC_DISPATCH(Join)(source, numbers, count, amax);
}

void decode_scaled(bool is_int8, float scale, const std::byte* data, std::uint64_t count,
                   Dtype target, std::byte* numbers) noexcept {
  HWY_DYNAMIC_DISPATCH(Decode)(is_int8, scale, data, count, target, numbers);
}

}  // namespace loadstone::simd

namespace loadstone {

std::uint64_t encode_bytes(const ScaledRun& run, const std::byte* numbers, std::uint64_t count,
                           std::byte* data) noexcept {
  return simd::encode_scaled(run, numbers, count, data);
}

std::uint64_t encode_mxfp8(Dtype source, bool is_rounded_log, const std::byte* numbers,
                           std::uint64_t columns, std::byte* data, std::byte* scales) noexcept {
  return simd::encode_mx(source, is_rounded_log, numbers, columns, data, scales);
}

std::uint64_t join_amax(Dtype source, const std::byte* numbers, std::uint64_t count,
                        float& amax) noexcept {
  return simd::join(source, numbers, count, amax);
}

void decode_bytes(bool is_int8, float scale, const std::byte* data, std::uint64_t count,
                  Dtype target, std::byte* numbers) noexcept {
  simd::decode_scaled(is_int8, scale, data, count, target, numbers);
}

}  // namespace loadstone
#endif
