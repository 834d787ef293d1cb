#include "kernels/gguf_reference.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/gguf/grid_data.h"
#include "kernels/number.h"

namespace loadstone::reference {

namespace {

// The bytes of a block, with functions that read its fields.
struct Fields {
  const std::byte* block;

  [[nodiscard]] unsigned byte(std::size_t at) const { return std::to_integer<unsigned>(block[at]); }
  [[nodiscard]] unsigned word(std::size_t at) const { return byte(at) | byte(at + 1) << 8; }
  // Returns `count` bits that begin at bit `first` of the bytes at offset `at`. Bit 0 is the low
  // bit of the first byte.
  [[nodiscard]] unsigned bits(std::size_t at, std::size_t first, unsigned count) const {
    unsigned value = 0;
    for (unsigned k = 0; k < count; ++k) {
      value |= (byte(at + (first + k) / 8) >> ((first + k) % 8) & 1u) << k;
    }
    return value;
  }
  [[nodiscard]] float half(std::size_t at) const { return number::load<Dtype::f16>(block + at); }
};

constexpr std::array<int, 16> iq4_values = {-127, -104, -83, -65, -49, -35, -22, -10,
                                            1,    13,   25,  38,  53,  69,  89,  113};
constexpr std::array<int, 16> e2m1_doubled = {0, 1,  2,  3,  4,  6,  8,  12,
                                              0, -1, -2, -3, -4, -6, -8, -12};

// Returns the 4 bits of value `i`. Each byte contains two values, whose indices differ by `apart`.
unsigned nibble(const Fields& in, std::size_t at, std::size_t i, std::size_t apart) {
  return in.bits(at + i / (2 * apart) * apart + i % apart, i / apart % 2 * 4, 4);
}

// Returns the 2 bits of value `i`. Each byte contains the values i, i + 32, i + 64 and i + 96.
unsigned quarter(const Fields& in, std::size_t at, std::size_t i) {
  return in.bits(at + i / 128 * 32 + i % 32, i / 32 % 4 * 2, 2);
}

int as_int(unsigned value) { return static_cast<int>(value); }

std::optional<Term> legacy_term(BlockFormat format, const Fields& in, std::size_t i) {
  const float scale = in.half(0);
  switch (format) {
    case BlockFormat::q4_0:
      return Term{.scale = scale, .code = as_int(nibble(in, 2, i, 16)) - 8};
    case BlockFormat::q4_1:
      return Term{scale, 1, as_int(nibble(in, 4, i, 16)), -in.half(2), 1};
    case BlockFormat::q5_0:
      return Term{.scale = scale,
                  .code = as_int(nibble(in, 6, i, 16) | in.bits(2, i, 1) << 4) - 16};
    case BlockFormat::q5_1:
      return Term{scale, 1, as_int(nibble(in, 8, i, 16) | in.bits(4, i, 1) << 4), -in.half(2), 1};
    case BlockFormat::q8_0:
      return Term{.scale = scale, .code = static_cast<std::int8_t>(in.byte(2 + i))};
    default:
      return std::nullopt;
  }
}

// Returns the scale of run `r` in Q4_K and Q5_K, or its minimum, which is stored 4 bytes later.
int six_bits(const Fields& in, std::size_t r, bool is_minimum) {
  const std::size_t at = 4 + (is_minimum ? 4 : 0) + r % 4;
  if (r < 4) return as_int(in.bits(at, 0, 6));
  return as_int(in.bits(12 + r % 4, is_minimum ? 4 : 0, 4) | in.bits(at, 6, 2) << 4);
}

std::optional<Term> k_term(BlockFormat format, const Fields& in, std::size_t i) {
  switch (format) {
    case BlockFormat::q2_k:
      return Term{in.half(80), as_int(in.bits(i / 16, 0, 4)), as_int(quarter(in, 16, i)),
                  in.half(82), as_int(in.bits(i / 16, 4, 4))};
    case BlockFormat::q3_k: {
      const std::size_t r = i / 16;
      const unsigned low = in.bits(96 + r % 8, r / 8 * 4, 4);
      const unsigned high = in.bits(104 + r % 4, r / 4 * 2, 2);
      const unsigned top = in.bits(i % 32, i / 32, 1);
      return Term{.scale = in.half(108),
                  .factor = as_int(low | high << 4) - 32,
                  .code = as_int(quarter(in, 32, i) | top << 2) - 4};
    }
    case BlockFormat::q4_k:
      return Term{in.half(0), six_bits(in, i / 32, false), as_int(nibble(in, 16, i, 32)),
                  in.half(2), six_bits(in, i / 32, true)};
    case BlockFormat::q5_k: {
      const unsigned top = in.bits(16 + i % 32, i / 32, 1);
      return Term{in.half(0), six_bits(in, i / 32, false), as_int(nibble(in, 48, i, 32) | top << 4),
                  in.half(2), six_bits(in, i / 32, true)};
    }
    case BlockFormat::q6_k:
      return Term{.scale = in.half(208),
                  .factor = static_cast<std::int8_t>(in.byte(192 + i / 16)),
                  .code = as_int(nibble(in, 0, i, 64) | quarter(in, 128, i) << 4) - 32};
    default:
      return std::nullopt;
  }
}

std::optional<Term> table_term(BlockFormat format, const Fields& in, std::size_t i) {
  switch (format) {
    case BlockFormat::iq4_nl:
      return Term{.scale = in.half(0), .code = iq4_values[nibble(in, 2, i, 16)]};
    case BlockFormat::iq4_xs: {
      const unsigned low = in.bits(4, 4 * (i / 32), 4);
      const unsigned high = in.bits(2, 2 * (i / 32), 2);
      return Term{.scale = in.half(0),
                  .factor = as_int(low | high << 4) - 32,
                  .code = iq4_values[nibble(in, 8, i, 16)]};
    }
    case BlockFormat::mxfp4:
      return Term{.scale = static_cast<float>(std::ldexp(1.0, as_int(in.byte(0)) - 128)),
                  .code = e2m1_doubled[nibble(in, 1, i, 16)]};
    case BlockFormat::nvfp4: {
      const unsigned byte = in.byte(i / 16);
      const int exponent = as_int(byte >> 3 & 15u);
      const int mantissa = as_int(byte & 7u) + (exponent == 0 ? 0 : 8);
      const float scale =
          byte == 0x7f ? 0.0f
                       : std::ldexp(static_cast<float>(mantissa), exponent - 11 + (exponent == 0));
      return Term{.scale = scale, .code = e2m1_doubled[nibble(in, 4, i, 8)]};
    }
    default:
      return std::nullopt;
  }
}

// Returns digit `d` of a TQ1_0 byte, minus 1. The byte divided by 256 is a fraction in base 3.
int digit(unsigned byte, std::size_t d) {
  for (; d > 0; --d) byte = byte * 3 % 256;
  return as_int(byte * 3 / 256) - 1;
}

std::optional<Term> low_bit_term(BlockFormat format, const Fields& in, std::size_t i) {
  switch (format) {
    case BlockFormat::tq1_0: {
      int code = 0;
      if (i < 160) {
        code = digit(in.byte(i % 32), i / 32);
      } else if (i < 240) {
        code = digit(in.byte(32 + i % 16), (i - 160) / 16);
      } else {
        code = digit(in.byte(48 + i % 4), (i - 240) / 4);
      }
      return Term{.scale = in.half(52), .code = code};
    }
    case BlockFormat::tq2_0:
      return Term{.scale = in.half(64), .code = as_int(quarter(in, 0, i)) - 1};
    case BlockFormat::q1_0:
      return Term{.scale = in.half(0), .code = in.bits(2, i, 1) != 0 ? 1 : -1};
    case BlockFormat::q2_0:
      return Term{.scale = in.half(0), .code = as_int(in.bits(2, 2 * i, 2)) - 1};
    default:
      return std::nullopt;
  }
}

// Returns coordinate `k` of a grid point, which is an index of 2 or 4 bits.
std::size_t coordinate(std::uint16_t point, std::size_t k, unsigned bits) {
  return point >> (bits * k) & ((1u << bits) - 1);
}

// Returns true if sign `k` is negative. Only 7 signs are stored: the eighth makes the number of
// negative signs even.
bool is_even_minus(unsigned signs, std::size_t k) {
  return k < 7 ? (signs >> k & 1u) != 0 : std::popcount(signs & 127u) % 2 != 0;
}

Term signed_term(float scale, int odd, int code, bool is_minus) {
  return {.scale = scale, .factor = odd, .code = is_minus ? -code : code};
}

std::optional<Term> iq2_term(BlockFormat format, const Fields& in, std::size_t i) {
  constexpr std::array<int, 3> values = {8, 25, 43};
  const float scale = in.half(0) / 8;
  const std::size_t p = i / 8;
  const std::size_t k = i % 8;
  switch (format) {
    case BlockFormat::iq2_xxs: {
      const std::size_t at = 2 + i / 32 * 8;
      const std::uint16_t point = simd::iq2_xxs_points[in.byte(at + p % 4)];
      return signed_term(scale, 2 * as_int(in.bits(at + 4, 28, 4)) + 1,
                         values[coordinate(point, k, 2)],
                         is_even_minus(in.bits(at + 4, 7 * (p % 4), 7), k));
    }
    case BlockFormat::iq2_xs: {
      const unsigned packed = in.word(2 + 2 * p);
      return signed_term(scale, 2 * as_int(in.bits(66, 4 * (i / 16), 4)) + 1,
                         values[coordinate(simd::iq2_xs_points[packed & 511], k, 2)],
                         is_even_minus(packed >> 9, k));
    }
    case BlockFormat::iq2_s: {
      const unsigned index = in.byte(2 + p) | in.bits(66, 2 * p, 2) << 8;
      return signed_term(scale, 2 * as_int(in.bits(74, 4 * (i / 16), 4)) + 1,
                         values[coordinate(simd::iq2_s_points[index], k, 2)],
                         in.bits(34, i, 1) != 0);
    }
    default:
      return std::nullopt;
  }
}

std::optional<Term> iq3_term(BlockFormat format, const Fields& in, std::size_t i) {
  constexpr std::array<int, 8> xxs_values = {4, 12, 20, 28, 36, 44, 52, 62};
  const std::size_t p = i / 4;
  const std::size_t k = i % 4;
  if (format == BlockFormat::iq3_xxs) {
    const std::size_t at = 66 + i / 32 * 4;
    const std::uint16_t point = simd::iq3_xxs_points[in.byte(2 + p)];
    return signed_term(in.half(0) / 4, 2 * as_int(in.bits(at, 28, 4)) + 1,
                       xxs_values[coordinate(point, k, 4)],
                       is_even_minus(in.bits(at, 7 * (i / 8 % 4), 7), i % 8));
  }
  if (format == BlockFormat::iq3_s) {
    const unsigned index = in.byte(2 + p) | in.bits(66, p, 1) << 8;
    const auto value = static_cast<int>(2 * coordinate(simd::iq3_s_points[index], k, 4) + 1);
    return signed_term(in.half(0), 2 * as_int(in.bits(106, 4 * (i / 32), 4)) + 1, value,
                       in.bits(74, i, 1) != 0);
  }
  return std::nullopt;
}

std::optional<Term> iq1_term(BlockFormat format, const Fields& in, std::size_t i) {
  const std::size_t p = i / 8;
  const auto eighths = [&](unsigned index, bool is_less) {
    const auto value = static_cast<int>(coordinate(simd::iq1_points[index], i % 8, 2)) - 1;
    return 8 * value + (is_less ? -1 : 1);
  };
  if (format == BlockFormat::iq1_s) {
    const unsigned packed = in.word(34 + 2 * (i / 32));
    const unsigned index = in.byte(2 + p) | (packed >> (3 * (p % 4)) & 7u) << 8;
    return Term{.scale = in.half(0) / 8,
                .factor = 2 * as_int(packed >> 12 & 7u) + 1,
                .code = eighths(index, packed >> 15 != 0)};
  }
  if (format == BlockFormat::iq1_m) {
    unsigned scale = 0;
    for (unsigned k = 0; k < 4; ++k) scale |= in.bits(48 + 2 * k, 12, 4) << (4 * k);
    const auto half = number::f32_from_f16(static_cast<std::uint16_t>(scale));
    const unsigned high = in.bits(32, 4 * p, 4);
    const std::size_t r = i / 16;
    return Term{.scale = std::bit_cast<float>(half) / 8,
                .factor = 2 * as_int(in.bits(48 + r / 4 * 2, r % 4 * 3, 3)) + 1,
                .code = eighths(in.byte(p) | (high & 7u) << 8, (high & 8u) != 0)};
  }
  return std::nullopt;
}

}  // namespace

std::vector<std::size_t> half_places(BlockFormat format) {
  switch (format) {
    case BlockFormat::iq1_m:  // the scale's 16 bits are stored in four parts
    case BlockFormat::mxfp4:
    case BlockFormat::nvfp4:
      return {};
    case BlockFormat::q4_1:
    case BlockFormat::q5_1:
    case BlockFormat::q4_k:
    case BlockFormat::q5_k:
      return {0, 2};
    case BlockFormat::q2_k:
      return {80, 82};
    case BlockFormat::q3_k:
      return {108};
    case BlockFormat::q6_k:
      return {208};
    case BlockFormat::tq1_0:
      return {52};
    case BlockFormat::tq2_0:
      return {64};
    default:
      return {0};
  }
}

std::optional<Term> term_of(BlockFormat format, const std::byte* block, std::size_t i) {
  for (const auto family :
       {legacy_term, k_term, table_term, low_bit_term, iq2_term, iq3_term, iq1_term}) {
    if (const auto term = family(format, Fields{block}, i)) return term;
  }
  return std::nullopt;
}

}  // namespace loadstone::reference
