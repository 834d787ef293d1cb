#include "verify/values.h"

#include <array>
#include <cstring>

namespace loadstone {

namespace {

// Where the scales stand in a block. `halves` are offsets of f16 numbers, -1 for none.
struct Scales {
  std::array<int, 2> halves;
  int bytes_begin;  // of one-byte scales whose NaN is `byte_nan`
  int bytes_count;
  unsigned byte_nan;
};

constexpr Scales one(int offset) noexcept { return {{offset, -1}, 0, 0, 0}; }
constexpr Scales two(int first, int second) noexcept { return {{first, second}, 0, 0, 0}; }

// In the order of BlockFormat. IQ1_M has its scale in four pieces, Q8_K as f32: see below.
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

// IEEE-like numbers: all exponent bits set means infinite, or NaN where the mantissa is not 0.
template <typename Bits>
ValueCounts count_ieee(std::span<const std::byte> bytes, Bits exponent, Bits mantissa) noexcept {
  ValueCounts counts;
  for (std::size_t i = 0; i < bytes.size(); i += sizeof(Bits)) {
    const Bits bits = load<Bits>(bytes.data() + i);
    const bool special = (bits & exponent) == exponent;
    const bool is_nan = special && (bits & mantissa) != 0;
    counts.nan += is_nan ? 1 : 0;
    counts.infinite += special && !is_nan ? 1 : 0;
  }
  return counts;
}

std::uint64_t count_bytes(std::span<const std::byte> bytes, unsigned mask,
                          unsigned wanted) noexcept {
  std::uint64_t count = 0;
  for (const std::byte each : bytes) {
    count += (std::to_integer<unsigned>(each) & mask) == wanted ? 1 : 0;
  }
  return count;
}

template <typename Bits>
ValueCounts count_numbers(const FloatFormat& format, std::span<const std::byte> bytes) noexcept {
  constexpr auto magnitude = static_cast<Bits>(static_cast<Bits>(~Bits{0}) >> 1);
  const auto mantissa = static_cast<Bits>((Bits{1} << (format.digits - 1)) - 1);
  return count_ieee<Bits>(bytes, static_cast<Bits>(magnitude & ~mantissa), mantissa);
}

ValueCounts count_dtype(Dtype dtype, std::span<const std::byte> bytes) noexcept {
  ValueCounts counts;
  const FloatFormat& format = dtype_info(dtype).format;
  const unsigned width = bits(dtype) / (kind(dtype) == DtypeKind::complex ? 2 : 1);
  if (dtype == Dtype::boolean) counts.bad_bools = bytes.size() - count_bytes(bytes, 0xfe, 0);
  switch (format.non_finite) {
    case NonFinite::none:
      break;
    case NonFinite::ieee:
      if (width == 64) return count_numbers<std::uint64_t>(format, bytes);
      if (width == 32) return count_numbers<std::uint32_t>(format, bytes);
      if (width == 16) return count_numbers<std::uint16_t>(format, bytes);
      return count_numbers<std::uint8_t>(format, bytes);
    case NonFinite::all_ones: {
      const unsigned mask = dtype_info(dtype).is_signed ? 0x7f : 0xff;
      counts.nan = count_bytes(bytes, mask, mask);
      break;
    }
    case NonFinite::minus_zero:
      counts.nan = count_bytes(bytes, 0xff, 0x80);
      break;
  }
  return counts;
}

bool half_is_odd(std::uint16_t half) noexcept { return (half & 0x7c00u) == 0x7c00u; }

// IQ1_M: the high nibble of each of four 16-bit words at byte 48, lowest first.
std::uint16_t iq1_m_scale(const std::byte* block) noexcept {
  unsigned scale = 0;
  for (unsigned i = 0; i < 4; ++i) {
    scale |= static_cast<unsigned>(load<std::uint16_t>(block + 48 + 2 * i) >> 12) << (4 * i);
  }
  return static_cast<std::uint16_t>(scale);
}

bool scale_is_odd(BlockFormat format, const std::byte* block) noexcept {
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

}  // namespace

ValueCounts& ValueCounts::operator+=(const ValueCounts& other) noexcept {
  nan += other.nan;
  infinite += other.infinite;
  bad_bools += other.bad_bools;
  bad_scales += other.bad_scales;
  return *this;
}

ValueCounts& ValueCounts::operator-=(const ValueCounts& other) noexcept {
  nan -= other.nan;
  infinite -= other.infinite;
  bad_bools -= other.bad_bools;
  bad_scales -= other.bad_scales;
  return *this;
}

std::size_t unit_bytes(Encoding encoding) noexcept {
  if (!encoding.is_dtype()) return layout(encoding.block_format()).bytes;
  const unsigned width = bits(encoding.dtype());
  return width < 8 ? 1 : width / 8;
}

ValueCounts count_values(Encoding encoding, std::span<const std::byte> bytes) noexcept {
  if (encoding.is_dtype()) return count_dtype(encoding.dtype(), bytes);
  ValueCounts counts;
  const std::size_t block = unit_bytes(encoding);
  for (std::size_t i = 0; i + block <= bytes.size(); i += block) {
    counts.bad_scales += scale_is_odd(encoding.block_format(), bytes.data() + i) ? 1 : 0;
  }
  return counts;
}

}  // namespace loadstone
