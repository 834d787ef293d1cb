// Encodes and decodes LLM.int8: rows of 8-bit integers, with one scale per row.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/bnb.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/bnb/int8.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/numbers_inl.h"

#ifndef LOADSTONE_KERNELS_BNB_INT8_ONCE
#define LOADSTONE_KERNELS_BNB_INT8_ONCE

namespace loadstone::simd {

// Magnitudes from this value on round to infinity in F16.
inline constexpr float f16_overflow = 65520.0f;
// A BF16 row with at least this absmax need not be rounded to F16: F16 represents the eight
// significant bits of values from 2^-17 on, and smaller values have code 0 either way.
inline constexpr float bf16_is_exact = 127.0f * 0x1p-15f;
inline constexpr float one_127th = 7.874015718698502e-3f;

inline float rounded_to_half(float value) noexcept {
  return std::bit_cast<float>(
      number::f32_from_f16(number::f16_from_f32(std::bit_cast<std::uint32_t>(value))));
}

inline float int8_factor(float absmax, BnbDialect dialect) noexcept {
  return dialect == BnbDialect::cpu ? (1.0f / absmax) * 127.0f : 127.0f / absmax;
}

}  // namespace loadstone::simd
#endif

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

using VF = hn::Vec<F32>;
using I8 = hn::Rebind<std::int8_t, F32>;

template <Dtype source, bool rounds>
HWY_INLINE void encode_vector(VF factors, const std::byte* from, std::byte* to) {
  VF values = load_numbers<source>(from);
  if constexpr (rounds) values = round_to_half(values);
  const auto codes = hn::DemoteTo(I8(), hn::NearestInt(hn::Mul(values, factors)));
  store_bits(hn::RebindToUnsigned<I8>(), hn::BitCast(hn::RebindToUnsigned<I8>(), codes), to);
}

template <Dtype source, bool rounds>
HWY_INLINE void encode_row(float factor, const std::byte* from, std::uint64_t count,
                           std::byte* to) {
  constexpr std::size_t bytes = number::bytes_of<source>;
  const std::size_t lanes = hn::Lanes(F32());
  const VF factors = hn::Set(F32(), factor);
  std::uint64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    encode_vector<source, rounds>(factors, from + i * bytes, to + i);
  }
  if (i == count) return;
  std::array<std::byte, 16 * bytes> last{};
  std::array<std::byte, 16> codes;
  std::memcpy(last.data(), from + i * bytes, (count - i) * bytes);
  encode_vector<source, rounds>(factors, last.data(), codes.data());
  std::memcpy(to + i, codes.data(), count - i);
}

template <Dtype source>
std::uint64_t encode_rows(BnbDialect dialect, const std::byte* from, std::uint64_t rows,
                          std::uint64_t columns, std::byte* to, std::byte* absmax) {
  const std::uint64_t row_bytes = columns * number::bytes_of<source>;
  std::uint64_t first_wrong = rows * columns;
  for (std::uint64_t row = 0; row < rows; ++row) {
    const std::byte* const numbers = from + row * row_bytes;
    const float most = largest_magnitude<source>(numbers, columns);
    store_number<Dtype::f32>(absmax + 4 * row, rounded_to_half(most));
    const bool is_wrong = !(most < f16_overflow);
    if (is_wrong && first_wrong == rows * columns) {
      first_wrong = row * columns + find_number<source>(numbers, columns, [](float value) {
                      return !(std::abs(value) < f16_overflow);
                    });
    }
    const float factor = int8_factor(rounded_to_half(most), dialect);
    std::byte* const codes = to + row * columns;
    if (is_wrong || !is_finite_number(factor)) {
      std::fill_n(codes, columns, std::byte{0});
    } else if (source == Dtype::f32 || (source == Dtype::bf16 && most < bf16_is_exact)) {
      encode_row<source, true>(factor, numbers, columns, codes);
    } else {
      encode_row<source, false>(factor, numbers, columns, codes);
    }
  }
  return first_wrong;
}

std::uint64_t Encode(BnbDialect dialect, Dtype source, const std::byte* from, std::uint64_t rows,
                     std::uint64_t columns, std::byte* to, std::byte* absmax) {
  return with_numbers(source, [&]<Dtype dtype>() {
    return encode_rows<dtype>(dialect, from, rows, columns, to, absmax);
  });
}

HWY_INLINE V decode_vector(VF factors, const std::byte* from) {
  const auto codes = hn::BitCast(I8(), load_bits(hn::RebindToUnsigned<I8>(), from));
  const VF numbers = hn::ConvertTo(F32(), hn::PromoteTo(I32(), codes));
  const VF products = hn::Mul(hn::Mul(numbers, factors), hn::Set(F32(), one_127th));
  return hn::BitCast(U32(), products);
}

// Decodes values of one row.
template <Dtype target>
HWY_INLINE void decode_run(float absmax, const std::byte* from, std::uint64_t count,
                           std::byte* to) {
  using Write = FiniteWriter<target>;
  std::uint64_t i = 0;
  // The largest intermediate product is 128 * absmax, before the division.
  if (HWY_LIKELY(is_finite_number(absmax * 128.0f))) {
    const VF factors = hn::Set(F32(), absmax);
    const std::size_t lanes = hn::Lanes(F32());
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
      Write::write_two(decode_vector(factors, from + i), decode_vector(factors, from + i + lanes),
                       to + i * Write::bytes);
    }
  }
  for (; i < count; ++i) {
    const auto code = static_cast<float>(number::load_raw<std::int8_t>(from + i));
    store_number<target>(to + i * Write::bytes, (code * absmax) * one_127th);
  }
}

template <Dtype target>
void decode_rows(std::uint64_t begin, std::uint64_t end, std::uint64_t columns,
                 const std::byte* from, const std::byte* absmax, std::byte* to) {
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t row = at / columns;
    const std::uint64_t count = std::min(end, (row + 1) * columns) - at;
    const auto scale = number::load_raw<float>(absmax + 4 * (row - begin / columns));
    decode_run<target>(scale, from + (at - begin), count, to);
    to += count * number::bytes_of<target>;
    at += count;
  }
}

void Decode(std::uint64_t begin, std::uint64_t end, std::uint64_t columns, const std::byte* from,
            const std::byte* absmax, Dtype target, std::byte* to) {
  return with_numbers(target, [&]<Dtype dtype>() {
    return decode_rows<dtype>(begin, end, columns, from, absmax, to);
  });
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(Encode);
HWY_EXPORT(Decode);

std::uint64_t encode_int8(BnbDialect dialect, Dtype source, const std::byte* numbers,
                          std::uint64_t rows, std::uint64_t columns, std::byte* data,
                          std::byte* absmax) noexcept {
  return HWY_DYNAMIC_DISPATCH(Encode)(dialect, source, numbers, rows, columns, data, absmax);
}

void decode_int8(std::uint64_t begin, std::uint64_t end, std::uint64_t columns,
                 const std::byte* data, const std::byte* absmax, Dtype target,
                 std::byte* numbers) noexcept {
  HWY_DYNAMIC_DISPATCH(Decode)(begin, end, columns, data, absmax, target, numbers);
}

}  // namespace loadstone::simd

namespace loadstone {

std::uint64_t encode_bnb_int8(BnbDialect dialect, Dtype source, const std::byte* numbers,
                              std::uint64_t rows, std::uint64_t columns, std::byte* data,
                              std::byte* absmax) noexcept {
  return simd::encode_int8(dialect, source, numbers, rows, columns, data, absmax);
}

void decode_bnb_int8(std::uint64_t begin, std::uint64_t end, std::uint64_t columns,
                     const std::byte* data, const std::byte* absmax, Dtype target,
                     std::byte* numbers) noexcept {
  simd::decode_int8(begin, end, columns, data, absmax, target, numbers);
}

}  // namespace loadstone
#endif
