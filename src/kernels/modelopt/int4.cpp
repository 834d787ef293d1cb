// Encodes int4 in two layouts of ModelOpt and in that of compressed-tensors. A model that ModelOpt
// compressed has inverse scales and two neighbours per byte, the first in the high bits. A model
// that it exported has two rows per byte.
#include <algorithm>
#include <array>

#include "kernels/modelopt.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/modelopt/int4.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/modelopt/small_inl.h"
#include "kernels/numbers_inl.h"

#ifndef LOADSTONE_KERNELS_MODELOPT_INT4_ONCE
#define LOADSTONE_KERNELS_MODELOPT_INT4_ONCE

namespace loadstone::simd {

// The values of a block after look_at(), with 0 for each NaN.
template <Dtype source, std::size_t values = scaled::int4_block>
struct Int4Block {
  static constexpr std::size_t size = values;
  std::array<std::byte, size * number::bytes_of<source>> without_nans;
  const std::byte* numbers = nullptr;
  std::uint64_t first_wrong = size;
  float most = 0;
};

}  // namespace loadstone::simd
#endif

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {
namespace {

template <Dtype source, std::size_t size>
HWY_INLINE void look_at(const std::byte* from, Int4Block<source, size>& block) {
  block.numbers = from;
  block.first_wrong = size;
  block.most = largest_of<source, size>(from);
  if (HWY_LIKELY(is_finite_number(block.most))) return;
  block.most = finite_magnitude<source>(from, size);
  block.first_wrong = find_not_finite<source>(from, size);
  zero_nans<source>(from, size, block.without_nans.data());
  block.numbers = block.without_nans.data();
}

template <Dtype source, bool rounds>
HWY_INLINE hn::Vec<I32> nearest(VF values) {
  if constexpr (rounds) values = round_to<source>(values);
  return hn::NearestInt(within(values, 8.0f));
}

template <Dtype source, bool rounds>
std::uint64_t encode_blocks(const std::byte* from, std::uint64_t count, std::byte* to,
                            std::byte* scales) {
  constexpr std::size_t bytes = number::bytes_of<source>;
  constexpr std::size_t size = Int4Block<source>::size;
  std::uint64_t first_wrong = count;
  Int4Block<source> block;
  const auto eight = hn::Set(I32(), 8);
  for (std::uint64_t at = 0; at < count; at += size) {
    look_at(from + at * bytes, block);
    if (block.first_wrong < size) first_wrong = std::min(first_wrong, at + block.first_wrong);
    const float scale = scaled::inverse_int4_scale(!rounds, source, block.most);
    constexpr Dtype stored = rounds ? source : Dtype::f32;
    store_number<stored>(scales + at / size * number::bytes_of<stored>, scale);
    const VF factors = hn::Set(F32(), scale);
    for (std::size_t i = 0; i < size / 2; i += hn::Lanes(F32())) {
      VF even;
      VF odd;
      load_pairs<source>(block.numbers + 2 * i * bytes, even, odd);
      const auto high = hn::Add(nearest<source, rounds>(hn::Mul(even, factors)), eight);
      const auto low = hn::Add(nearest<source, rounds>(hn::Mul(odd, factors)), eight);
      write_u8(hn::BitCast(U32(), hn::Or(low, hn::ShiftLeft<4>(high))), to + at / 2 + i);
    }
  }
  return first_wrong;
}

template <Dtype source>
std::uint64_t encode_as(bool rounds, const std::byte* from, std::uint64_t count, std::byte* to,
                        std::byte* scales) {
  return rounds ? encode_blocks<source, true>(from, count, to, scales)
                : encode_blocks<source, false>(from, count, to, scales);
}

std::uint64_t Encode(Dtype source, bool rounds, const std::byte* from, std::uint64_t count,
                     std::byte* to, std::byte* scales) {
  return with_numbers(
      source, [&]<Dtype dtype>() { return encode_as<dtype>(rounds, from, count, to, scales); });
}

// Encodes two rows. The scales of the first row come before those of the second.
template <Dtype source>
std::uint64_t encode_two_rows(const std::byte* from, std::uint64_t columns, std::byte* to,
                              std::byte* scales) {
  constexpr std::size_t bytes = number::bytes_of<source>;
  constexpr std::size_t size = Int4Block<source>::size;
  std::uint64_t first_wrong = 2 * columns;
  std::array<Int4Block<source>, 2> blocks;
  const auto low_four = hn::Set(I32(), 15);
  for (std::uint64_t at = 0; at < columns; at += size) {
    std::array<float, 2> row_scales;
    for (std::size_t row = 0; row < 2; ++row) {
      const std::uint64_t begin = row * columns + at;
      look_at(from + begin * bytes, blocks[row]);
      if (blocks[row].first_wrong < size) {
        first_wrong = std::min(first_wrong, begin + blocks[row].first_wrong);
      }
      const float scale = blocks[row].most / 7.0f;
      row_scales[row] = scale > 0 ? scale : 1.0f;
      number::store_raw(scales + begin / size * sizeof(float), row_scales[row]);
    }
    const VF upper = hn::Set(F32(), row_scales[0]);
    const VF lower = hn::Set(F32(), row_scales[1]);
    for (std::size_t i = 0; i < size; i += hn::Lanes(F32())) {
      const auto code = [&](std::size_t row, VF divisors) {
        const VF values = load_numbers<source>(blocks[row].numbers + i * bytes);
        return hn::And(nearest<source, false>(hn::Div(values, divisors)), low_four);
      };
      const auto packed = hn::Or(code(0, upper), hn::ShiftLeft<4>(code(1, lower)));
      write_u8(hn::BitCast(U32(), packed), to + at + i);
    }
  }
  return first_wrong;
}

template <Dtype source, std::size_t size>
std::uint64_t encode_groups(const std::byte* from, std::uint64_t count, std::byte* to,
                            std::byte* scales) {
  constexpr std::size_t bytes = number::bytes_of<source>;
  std::uint64_t first_wrong = count;
  Int4Block<source, size> block;
  const auto eight = hn::Set(I32(), 8);
  for (std::uint64_t at = 0; at < count; at += size) {
    look_at(from + at * bytes, block);
    if (block.first_wrong < size) first_wrong = std::min(first_wrong, at + block.first_wrong);
    const float scale = scaled::int4_group_scale(source, block.most);
    store_number<source>(scales + at / size * bytes, scale);
    const VF divisors = hn::Set(F32(), scale);
    for (std::size_t i = 0; i < size / 2; i += hn::Lanes(F32())) {
      VF even;
      VF odd;
      load_pairs<source>(block.numbers + 2 * i * bytes, even, odd);
      const auto low = hn::Add(nearest<source, true>(hn::Div(even, divisors)), eight);
      const auto high = hn::Add(nearest<source, true>(hn::Div(odd, divisors)), eight);
      write_u8(hn::BitCast(U32(), hn::Or(low, hn::ShiftLeft<4>(high))), to + at / 2 + i);
    }
  }
  return first_wrong;
}

std::uint64_t EncodeGroups(Dtype source, std::uint64_t group_size, const std::byte* from,
                           std::uint64_t count, std::byte* to, std::byte* scales) {
  return with_numbers(source, [&]<Dtype dtype>() {
    return group_size == 32 ? encode_groups<dtype, 32>(from, count, to, scales)
                            : encode_groups<dtype, 128>(from, count, to, scales);
  });
}

std::uint64_t EncodeRows(Dtype source, const std::byte* from, std::uint64_t columns, std::byte* to,
                         std::byte* scales) {
  return with_numbers(
      source, [&]<Dtype dtype>() { return encode_two_rows<dtype>(from, columns, to, scales); });
}

}  // namespace
}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(Encode);
HWY_EXPORT(EncodeRows);
HWY_EXPORT(EncodeGroups);

std::uint64_t encode_int4_blocks(Dtype source, bool rounds, const std::byte* numbers,
                                 std::uint64_t count, std::byte* data, std::byte* scales) noexcept {
  return HWY_DYNAMIC_DISPATCH(Encode)(source, rounds, numbers, count, data, scales);
}

std::uint64_t encode_int4_two_rows(Dtype source, const std::byte* numbers, std::uint64_t columns,
                                   std::byte* data, std::byte* scales) noexcept {
  return HWY_DYNAMIC_DISPATCH(EncodeRows)(source, numbers, columns, data, scales);
}

std::uint64_t encode_int4_in_groups(Dtype source, std::uint64_t group_size,
                                    const std::byte* numbers, std::uint64_t count, std::byte* data,
                                    std::byte* scales) noexcept {
  return HWY_DYNAMIC_DISPATCH(EncodeGroups)(source, group_size, numbers, count, data, scales);
}

}  // namespace loadstone::simd

namespace loadstone {

std::uint64_t encode_int4(Dtype source, bool rounds, const std::byte* numbers, std::uint64_t count,
                          std::byte* data, std::byte* scales) noexcept {
  return simd::encode_int4_blocks(source, rounds, numbers, count, data, scales);
}

std::uint64_t encode_int4_rows(Dtype source, const std::byte* numbers, std::uint64_t columns,
                               std::byte* data, std::byte* scales) noexcept {
  return simd::encode_int4_two_rows(source, numbers, columns, data, scales);
}

std::uint64_t encode_int4_groups(Dtype source, std::uint64_t group_size, const std::byte* numbers,
                                 std::uint64_t count, std::byte* data, std::byte* scales) noexcept {
  return simd::encode_int4_in_groups(source, group_size, numbers, count, data, scales);
}

}  // namespace loadstone
#endif
