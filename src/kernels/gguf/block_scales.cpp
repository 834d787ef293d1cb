#include "kernels/gguf/block_scales.h"

#include <array>
#include <cstdint>
#include <cstring>

namespace loadstone {

namespace {

// Byte offsets of the scales in a block. `halves`: offsets of F16 scales, -1 if there are fewer.
struct Scales {
  std::array<int, 2> halves;
  int bytes_begin;  // offset of one-byte scales, which are NaN if they are `byte_nan`
  int bytes_count;
  unsigned byte_nan;
};

constexpr Scales one(int offset) noexcept { return {{offset, -1}, 0, 0, 0}; }
constexpr Scales two(int first, int second) noexcept { return {{first, second}, 0, 0, 0}; }

// One entry per BlockFormat, in its order. has_nonfinite_scale() reads two more scales: IQ1_M's,
// which is split over four words, and Q8_K's, which is F32.
constexpr auto scale_rows = std::to_array<Scales>({
    one(0),                  // q4_0
    two(0, 2),               // q4_1
    one(0),                  // q5_0
    two(0, 2),               // q5_1
    one(0),                  // q8_0
    two(0, 2),               // q8_1
    two(80, 82),             // q2_k
    one(108),                // q3_k
    two(0, 2),               // q4_k
    two(0, 2),               // q5_k
    one(208),                // q6_k
    one(-1),                 // q8_k
    one(0),                  // iq2_xxs
    one(0),                  // iq2_xs
    one(0),                  // iq3_xxs
    one(0),                  // iq1_s
    one(0),                  // iq4_nl
    one(0),                  // iq3_s
    one(0),                  // iq2_s
    one(0),                  // iq4_xs
    one(-1),                 // iq1_m
    one(52),                 // tq1_0
    one(64),                 // tq2_0
    {{-1, -1}, 0, 1, 0xff},  // mxfp4: E8M0
    {{-1, -1}, 0, 4, 0x7f},  // nvfp4: E4M3 without sign
    one(0),                  // q1_0
    one(0),                  // q2_0
});
static_assert(scale_rows.size() == static_cast<std::size_t>(BlockFormat::q2_0) + 1);

template <typename Bits>
Bits load(const std::byte* from) noexcept {
  Bits bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

bool half_is_odd(std::uint16_t half) noexcept { return (half & 0x7c00u) == 0x7c00u; }

// Joins the four nibbles of IQ1_M's scale: each is the high nibble of a 16-bit word from byte 48
// on, the lowest nibble first.
std::uint16_t iq1_m_scale(const std::byte* block) noexcept {
  unsigned scale = 0;
  for (unsigned i = 0; i < 4; ++i) {
    scale |= static_cast<unsigned>(load<std::uint16_t>(block + 48 + 2 * i) >> 12) << (4 * i);
  }
  return static_cast<std::uint16_t>(scale);
}

}  // namespace

bool has_nonfinite_scale(BlockFormat format, const std::byte* block) noexcept {
  if (format == BlockFormat::iq1_m) return half_is_odd(iq1_m_scale(block));
  if (format == BlockFormat::q8_k) {
    return (load<std::uint32_t>(block) & 0x7f80'0000u) == 0x7f80'0000u;
  }
  const Scales& scales = scale_rows[static_cast<std::size_t>(format)];
  for (const int offset : scales.halves) {
    if (offset >= 0 && half_is_odd(load<std::uint16_t>(block + offset))) return true;
  }
  for (int i = 0; i < scales.bytes_count; ++i) {
    const auto scale = std::to_integer<unsigned>(block[scales.bytes_begin + i]);
    if (scale == scales.byte_nan) return true;
  }
  return false;
}

bool has_zero_scales(BlockFormat format, const std::byte* block) noexcept {
  constexpr unsigned magnitude = 0x7fff;
  if (format == BlockFormat::iq1_m) return (iq1_m_scale(block) & magnitude) == 0;
  const std::array<int, 2> offsets = scale_rows[static_cast<std::size_t>(format)].halves;
  const auto is_zero = [&](int offset) {
    return offset < 0 || (load<std::uint16_t>(block + offset) & magnitude) == 0;
  };
  return offsets[0] >= 0 && is_zero(offsets[0]) && is_zero(offsets[1]);
}

}  // namespace loadstone
