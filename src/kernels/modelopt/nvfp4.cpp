// Encodes nvfp4: E2M1 codes in blocks of 16 with an F8_E4M3 scale each, and one F32 scale for all
// blocks. A byte contains two codes, the first in the low bits.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/modelopt.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/modelopt/nvfp4.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/modelopt/small_inl.h"
#include "kernels/numbers_inl.h"

#ifndef LOADSTONE_KERNELS_MODELOPT_NVFP4_ONCE
#define LOADSTONE_KERNELS_MODELOPT_NVFP4_ONCE

namespace loadstone::simd {

inline constexpr std::size_t block = 16;
inline constexpr std::size_t pairs = block / 2;
inline constexpr std::size_t blocks_at_once = 64;

// Encodes one value that is already divided by its block's scale, finite or not.
inline unsigned e2m1_of(float value) noexcept {
  constexpr std::array<float, 7> bounds = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const float magnitude = std::abs(value);
  unsigned code = 0;
  for (std::size_t i = 0; i < bounds.size(); ++i) {
    const bool up = i % 2 == 0 ? magnitude > bounds[i] : magnitude >= bounds[i];
    code += up ? 1u : 0u;
  }
  return code + (value < 0 ? 8u : 0u);
}

}  // namespace loadstone::simd
#endif

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {
namespace {

// The scales of several blocks.
struct Scales {
  alignas(64) std::array<float, blocks_at_once> amax{};
  alignas(64) std::array<float, blocks_at_once> divisor{};
  std::array<std::byte, blocks_at_once> codes{};
};

// Computes the scales of `count` blocks from their `amax` and the tensor's scale.
HWY_INLINE void find_scales(float scale_2, std::size_t count, Scales& scales) {
  const VF all_scale = hn::Set(F32(), scale_2);
  const VF divisor = hn::Set(F32(), 6.0f * scale_2);
  const VF one = hn::Set(F32(), 1.0f);
  const VF infinity = hn::Set(F32(), std::numeric_limits<float>::infinity());
  for (std::size_t i = 0; i < count; i += hn::Lanes(F32())) {
    VF scale = hn::Div(hn::Load(F32(), scales.amax.data() + i), divisor);
    scale = hn::IfThenElse(hn::Eq(scale, hn::Zero(F32())), one, scale);
    scale = hn::Min(hn::Max(scale, hn::Set(F32(), 0x1p-9f)), hn::Set(F32(), 448.0f));
    const V codes = e4m3_of_bits(hn::BitCast(U32(), scale));
    write_u8(codes, scales.codes.data() + i);
    const VF product = hn::Mul(positive_of_e4m3(codes), all_scale);
    const auto is_zero = hn::Eq(product, hn::Zero(F32()));  // then every value is encoded as 0
    hn::Store(hn::IfThenElse(is_zero, infinity, product), F32(), scales.divisor.data() + i);
  }
}

HWY_INLINE V codes_of(VF values) {
  const auto is_negative = hn::RebindMask(U32(), hn::Lt(values, hn::Zero(F32())));
  const V sign = hn::IfThenElseZero(is_negative, all(8));
  return hn::Or(e2m1_of_bits(hn::BitCast(U32(), values)), sign);
}

// Encodes an even number of blocks. Returns the index of the first non-finite value.
template <Dtype source>
std::uint64_t encode_blocks(float scale_2, const std::byte* from, std::size_t count, std::byte* to,
                            std::byte* codes) {
  constexpr std::size_t bytes = number::bytes_of<source>;
  Scales scales;
  std::uint64_t first_wrong = count * block;
  for (std::size_t i = 0; i < count; ++i) {
    const std::byte* const numbers = from + i * block * bytes;
    scales.amax[i] = largest_of<source, block>(numbers);
    if (HWY_LIKELY(is_finite_number(scales.amax[i]))) continue;
    scales.amax[i] = finite_magnitude<source>(numbers, block);
    first_wrong = std::min(first_wrong, i * block + find_not_finite<source>(numbers, block));
  }
  find_scales(scale_2, count, scales);
  std::copy_n(scales.codes.begin(), count, codes);
  alignas(64) std::array<float, blocks_at_once * pairs> divisors;
  for (std::size_t i = 0; i < count; ++i) {
    std::fill_n(divisors.begin() + i * pairs, pairs, scales.divisor[i]);
  }
  for (std::size_t i = 0; i < count * pairs; i += hn::Lanes(F32())) {
    VF even;
    VF odd;
    load_pairs<source>(from + 2 * i * bytes, even, odd);
    const VF divisor = hn::Load(F32(), divisors.data() + i);
    const V low = codes_of(hn::Div(even, divisor));
    const V high = codes_of(hn::Div(odd, divisor));
    write_u8(hn::Or(low, hn::ShiftLeft<4>(high)), to + i);
  }
  if (HWY_LIKELY(first_wrong == count * block)) return first_wrong;
  for (std::size_t i = first_wrong / block * pairs; i < count * pairs; ++i) {
    const auto code = [&](std::size_t k) {
      return e2m1_of(number::load<source>(from + (2 * i + k) * bytes) / divisors[i]);
    };
    to[i] = static_cast<std::byte>(code(0) | code(1) << 4);
  }
  return first_wrong;
}

template <Dtype source>
std::uint64_t encode_row(float scale_2, const std::byte* from, std::uint64_t columns, std::byte* to,
                         std::byte* scales) {
  constexpr std::size_t bytes = number::bytes_of<source>;
  std::uint64_t first_wrong = columns;
  std::uint64_t at = 0;
  while (at < columns) {
    const std::uint64_t left = (columns - at) / (2 * block) * 2;
    if (left > 0) {
      const auto count = static_cast<std::size_t>(std::min<std::uint64_t>(left, blocks_at_once));
      const std::uint64_t wrong = encode_blocks<source>(scale_2, from + at * bytes, count,
                                                        to + at / 2, scales + at / block);
      if (wrong < count * block) first_wrong = std::min(first_wrong, at + wrong);
      at += count * block;
      continue;
    }
    // Fewer than two whole blocks remain, so zeros are appended.
    const std::uint64_t size = columns - at;
    const std::size_t count = (size + block - 1) / block;
    std::array<std::byte, 2 * block * bytes> numbers{};
    std::array<std::byte, 2 * pairs> data;
    std::array<std::byte, 2> codes;
    std::memcpy(numbers.data(), from + at * bytes, size * bytes);
    const std::uint64_t wrong =
        encode_blocks<source>(scale_2, numbers.data(), 2, data.data(), codes.data());
    if (wrong < size) first_wrong = std::min(first_wrong, at + wrong);
    std::copy_n(data.begin(), count * pairs, to + at / 2);
    std::copy_n(codes.begin(), count, scales + at / block);
    at = columns;
  }
  return first_wrong;
}

std::uint64_t Encode(Dtype source, float scale_2, const std::byte* from, std::uint64_t columns,
                     std::byte* to, std::byte* scales) {
  return with_numbers(
      source, [&]<Dtype dtype>() { return encode_row<dtype>(scale_2, from, columns, to, scales); });
}

}  // namespace
}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(Encode);

std::uint64_t encode_nvfp4_row(Dtype source, float scale_2, const std::byte* numbers,
                               std::uint64_t columns, std::byte* data, std::byte* scales) noexcept {
  return HWY_DYNAMIC_DISPATCH(Encode)(source, scale_2, numbers, columns, data, scales);
}

}  // namespace loadstone::simd

namespace loadstone {

std::uint64_t encode_nvfp4(Dtype source, float scale_2, const std::byte* numbers,
                           std::uint64_t columns, std::byte* data, std::byte* scales) noexcept {
  return simd::encode_nvfp4_row(source, scale_2, numbers, columns, data, scales);
}

}  // namespace loadstone
#endif
