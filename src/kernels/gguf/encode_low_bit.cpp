// Encodes TQ1_0 and TQ2_0. Each value becomes -1, 0 or 1 times the largest magnitude of its block.
#include <array>

#include "kernels/gguf/codes.h"
#include "kernels/gguf/families.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gguf/encode_low_bit.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/gguf/codes_inl.h"

#ifndef LOADSTONE_KERNELS_GGUF_ENCODE_LOW_BIT_ONCE
#define LOADSTONE_KERNELS_GGUF_ENCODE_LOW_BIT_ONCE

namespace loadstone::simd {

inline constexpr std::size_t ternary_elements = 256;
using TernaryCodes = std::array<std::uint8_t, ternary_elements>;  // each 0, 1 or 2

// The byte for each number of five base-3 digits: the number / 243 in units of 1/256, rounded up.
inline constexpr auto ternary_bytes = [] {
  std::array<std::byte, 243> bytes{};
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>((i * 256 + 242) / 243);
  }
  return bytes;
}();

// Packs `count` bytes. Consecutive digits of a byte are `count` codes apart; the first digit is the
// highest.
template <std::size_t count, std::size_t digits>
inline void pack_digits(const std::uint8_t* codes, std::byte* to) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    unsigned packed = 0;
    for (std::size_t digit = 0; digit < digits; ++digit) {
      packed = 3 * packed + codes[digit * count + i];
    }
    for (std::size_t digit = digits; digit < 5; ++digit) packed *= 3;
    to[i] = ternary_bytes[packed];
  }
}

}  // namespace loadstone::simd
#endif

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

// Computes the codes of a block and returns its scale.
HWY_INLINE float ternary_codes(const float* numbers, TernaryCodes& codes) {
  const F32 d;
  VF most = hn::Zero(d);
  for (std::size_t i = 0; i < ternary_elements; i += hn::Lanes(d)) {
    most = hn::Max(most, hn::Abs(hn::LoadU(d, numbers + i)));
  }
  const float scale = hn::GetLane(hn::MaxOfLanes(d, most));
  const float inverse = scale != 0 ? 1.0f / scale : 0.0f;
  codes.fill(1);  // x86-64 yields this code for infinite products
  if (!is_finite_number(inverse)) return scale;
  for (std::size_t i = 0; i < ternary_elements; i += hn::Lanes(d)) {
    const VI rounded = rounded_away(hn::Mul(hn::LoadU(d, numbers + i), floats(inverse)));
    store_codes(hn::Add(rounded, integers(1)), codes.data() + i);
  }
  return scale;
}

struct ToTq1_0 {
  static constexpr std::size_t block_bytes = 54;
  static void pack(const TernaryCodes& codes, float scale, std::byte* block) {
    pack_digits<32, 5>(codes.data(), block);
    pack_digits<16, 5>(codes.data() + 160, block + 32);
    pack_digits<4, 4>(codes.data() + 240, block + 48);
    store_f16(block + 52, scale);
  }
};

struct ToTq2_0 {
  static constexpr std::size_t block_bytes = 66;
  static void pack(const TernaryCodes& codes, float scale, std::byte* block) {
    for (std::size_t i = 0; i < 64; i += 8) {
      const std::uint8_t* const from = codes.data() + i / 32 * 128 + i % 32;
      std::uint64_t packed = eight_codes(from);
      for (std::size_t k = 1; k < 4; ++k) packed |= eight_codes(from + 32 * k) << (2 * k);
      number::store_raw(block + i, packed);
    }
    store_f16(block + 64, scale);
  }
};

template <class Format>
void encode_ternary(const float* numbers, std::uint64_t block_count,
                    const BlockImportance* /*importance*/, std::byte* blocks) noexcept {
  for (std::uint64_t i = 0; i < block_count; ++i) {
    TernaryCodes codes;
    const float scale = ternary_codes(numbers + i * ternary_elements, codes);
    Format::pack(codes, scale, blocks + i * Format::block_bytes);
  }
}

EncodeBlocks FindLowBitEncoder(BlockFormat format) {
  switch (format) {
    case BlockFormat::tq1_0:
      return encode_ternary<ToTq1_0>;
    case BlockFormat::tq2_0:
      return encode_ternary<ToTq2_0>;
    default:
      return nullptr;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(FindLowBitEncoder);

EncodeBlocks low_bit_encoder(BlockFormat format) noexcept {
  return HWY_DYNAMIC_DISPATCH(FindLowBitEncoder)(format);
}

}  // namespace loadstone::simd
#endif
