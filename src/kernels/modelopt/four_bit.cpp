// Decodes 4-bit codes, two per byte: E2M1 and integers.
#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/modelopt.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/modelopt/four_bit.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/modelopt/small_inl.h"
#include "kernels/numbers_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {
namespace {

// Returns the values of the codes, multiplied or divided by their scales.
template <FourBit type>
HWY_INLINE VF scaled_values(V codes, VF scales) {
  if constexpr (type == FourBit::e2m1) {
    const V shifted = hn::ShiftLeft<22>(hn::And(codes, all(7)));
    const V base = all(127u << 23);
    const V small = subtract_floats(hn::Add(shifted, base), base);
    const V bits = where_greater(all(2u << 22), shifted, small, hn::Add(shifted, all(126u << 23)));
    const V sign = hn::ShiftLeft<28>(hn::And(codes, all(8)));
    return hn::Mul(hn::BitCast(F32(), hn::Or(bits, sign)), scales);
  } else {
    // The types with integers.
    const V shifted = type == FourBit::twos ? hn::Xor(codes, all(8)) : codes;
    const auto whole = hn::Sub(hn::BitCast(I32(), shifted), hn::Set(I32(), 8));
    const VF value = hn::ConvertTo(F32(), whole);
    if constexpr (type == FourBit::offset) return hn::Div(value, scales);
    return hn::Mul(value, scales);
  }
}

// Decodes the low and the high halves of a vector of bytes to F32.
template <FourBit type>
HWY_INLINE void decode_vector(const std::byte* from, VF scales, float* low, float* high) {
  const V bytes = hn::PromoteTo(U32(), load_bits(U8(), from));
  hn::StoreU(scaled_values<type>(hn::And(bytes, all(15)), scales), F32(), low);
  hn::StoreU(scaled_values<type>(hn::ShiftRight<4>(bytes), scales), F32(), high);
}

template <Dtype target>
void decode_run(FourBit type, float scale, const std::byte* from, std::uint64_t begin,
                std::uint64_t end, std::byte* to) {
  const VF scales = hn::Set(F32(), scale);
  const std::size_t lanes = hn::Lanes(F32());
  const bool is_high_first = type == FourBit::offset;
  std::array<float, 16> low{};
  std::array<float, 16> high{};
  for (std::uint64_t at = begin / 2; 2 * at < end; at += lanes) {
    const auto size = static_cast<std::size_t>(std::min<std::uint64_t>(lanes, (end + 1) / 2 - at));
    std::array<std::byte, 16> bytes{};
    std::memcpy(bytes.data(), from + (at - begin / 2), size);
    if (type == FourBit::e2m1) {
      decode_vector<FourBit::e2m1>(bytes.data(), scales, low.data(), high.data());
    } else if (type == FourBit::packed) {
      decode_vector<FourBit::packed>(bytes.data(), scales, low.data(), high.data());
    } else {
      decode_vector<FourBit::offset>(bytes.data(), scales, low.data(), high.data());
    }
    for (std::uint64_t i = std::max(begin, 2 * at); i < std::min(end, 2 * (at + size)); ++i) {
      const bool is_low = (i % 2 == 0) != is_high_first;
      const std::size_t lane = i / 2 - at;
      store_number<target>(to + (i - begin) * number::bytes_of<target>,
                           is_low ? low[lane] : high[lane]);
    }
  }
}

void Decode(FourBit type, float scale, const std::byte* from, std::uint64_t begin,
            std::uint64_t end, Dtype target, std::byte* to) {
  return with_numbers(
      target, [&]<Dtype dtype>() { return decode_run<dtype>(type, scale, from, begin, end, to); });
}

// Decodes `count` packed bytes of two rows: low halves go to `first`, high halves to `second`.
template <Dtype target>
void decode_two_rows(float upper, float lower, const std::byte* from, std::uint64_t count,
                     std::byte* first, std::byte* second) {
  const std::size_t lanes = hn::Lanes(F32());
  for (std::uint64_t at = 0; at < count; at += lanes) {
    const auto size = static_cast<std::size_t>(std::min<std::uint64_t>(lanes, count - at));
    std::array<std::byte, 16> bytes{};
    std::memcpy(bytes.data(), from + at, size);
    const V codes = hn::PromoteTo(U32(), load_bits(U8(), bytes.data()));
    std::array<float, 16> low{};
    std::array<float, 16> high{};
    hn::StoreU(scaled_values<FourBit::twos>(hn::And(codes, all(15)), hn::Set(F32(), upper)), F32(),
               low.data());
    hn::StoreU(scaled_values<FourBit::twos>(hn::ShiftRight<4>(codes), hn::Set(F32(), lower)), F32(),
               high.data());
    for (std::size_t i = 0; i < size; ++i) {
      store_number<target>(first + (at + i) * number::bytes_of<target>, low[i]);
      store_number<target>(second + (at + i) * number::bytes_of<target>, high[i]);
    }
  }
}

void DecodeRows(float upper, float lower, const std::byte* from, std::uint64_t count, Dtype target,
                std::byte* first, std::byte* second) {
  return with_numbers(target, [&]<Dtype dtype>() {
    return decode_two_rows<dtype>(upper, lower, from, count, first, second);
  });
}

}  // namespace
}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(Decode);
HWY_EXPORT(DecodeRows);

void decode_halves(FourBit type, float scale, const std::byte* data, std::uint64_t begin,
                   std::uint64_t end, Dtype target, std::byte* numbers) noexcept {
  HWY_DYNAMIC_DISPATCH(Decode)(type, scale, data, begin, end, target, numbers);
}

void decode_two(float upper, float lower, const std::byte* data, std::uint64_t count, Dtype target,
                std::byte* first, std::byte* second) noexcept {
  HWY_DYNAMIC_DISPATCH(DecodeRows)(upper, lower, data, count, target, first, second);
}

}  // namespace loadstone::simd

namespace loadstone {

void decode_four_bit(FourBit type, float scale, const std::byte* data, std::uint64_t begin,
                     std::uint64_t end, Dtype target, std::byte* numbers) noexcept {
  simd::decode_halves(type, scale, data, begin, end, target, numbers);
}

void decode_int4_rows(float upper, float lower, const std::byte* data, std::uint64_t count,
                      Dtype target, std::byte* first, std::byte* second) noexcept {
  simd::decode_two(upper, lower, data, count, target, first, second);
}

}  // namespace loadstone
#endif
