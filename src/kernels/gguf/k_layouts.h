// Block layouts of Q2_K to Q6_K: offsets of scales and codes, and how a block's scales are encoded.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "kernels/gguf/codes.h"
#include "kernels/gguf/groups.h"
#include "kernels/gguf/lanes.h"

namespace loadstone::simd {

inline constexpr std::size_t k_elements = 256;

// Orders of the runs in lanes. Two runs whose codes share a byte must be eight lanes apart. Runs of
// 32 share a byte with the next run, and runs of 16 with the run four places later.
inline constexpr LaneOrder order_of_32 = {0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};
inline constexpr LaneOrder order_of_16 = {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15};

template <std::size_t run>
constexpr LaneOrder lane_order() noexcept {
  return run == 32 ? order_of_32 : order_of_16;
}

// Returns the largest value, or 0 if none is positive. Ignores NaNs, as ggml does.
inline float largest(const float* values, std::size_t count) noexcept {
  float most = 0;
  for (std::size_t i = 0; i < count; ++i) most = values[i] > most ? values[i] : most;
  return most;
}

inline std::uint64_t low_codes(const std::uint8_t* codes, std::size_t i) noexcept {
  return eight_codes(codes + i * lane_count);
}
inline std::uint64_t high_codes(const std::uint8_t* codes, std::size_t i) noexcept {
  return eight_codes(codes + i * lane_count + 8);
}
inline std::byte byte_at(std::uint64_t word, std::size_t i) noexcept {
  return static_cast<std::byte>(word >> (8 * i));
}

// ---- Q4_K and Q5_K: scales and minima of six bits

// Encodes the scales or minima of a block relative to the largest one. Returns the scale of the
// codes.
template <std::size_t count, int top>
inline float codes_of_largest(const float* values, int* codes) noexcept {
  const float most = largest(values, count);
  const float inverse = most > 0 ? top / most : 0.0f;
  for (std::size_t i = 0; i < count; ++i) codes[i] = nearest_integer(inverse * values[i]);
  return most / top;
}

// Stores six-bit codes like ggml. The last four scales and minima are split over two bytes. Codes
// above 63 are not checked: they lose bits or change other codes, as in ggml.
inline void store_six_bit(const int* scales, const int* minima, std::byte* to) noexcept {
  for (std::size_t i = 0; i < 4; ++i) {
    const int scale = byte_of(scales[i + 4]);
    const int minimum = byte_of(minima[i + 4]);
    to[i] = std::byte(byte_of(scales[i] | scale >> 4 << 6));
    to[i + 4] = std::byte(byte_of(minima[i] | minimum >> 4 << 6));
    to[i + 8] = std::byte(byte_of((scale & 15) | (minimum & 15) << 4));
  }
}

// Reads the bytes that store_six_bit() wrote.
inline void load_six_bit(const std::byte* from, int* scales, int* minima) noexcept {
  const auto at = [&](std::size_t i) { return std::to_integer<int>(from[i]); };
  for (std::size_t i = 0; i < 4; ++i) {
    scales[i] = at(i) & 63;
    minima[i] = at(i + 4) & 63;
    scales[i + 4] = (at(i + 8) & 15) | at(i) >> 6 << 4;
    minima[i + 4] = at(i + 8) >> 4 | at(i + 4) >> 6 << 4;
  }
}

// Layout of a block with one scale and offset, and six-bit codes for the runs' scales and minima.
struct SixBitLayout {
  static constexpr std::size_t elements = k_elements;
  static constexpr std::size_t run = 32;
  static constexpr std::size_t blocks = 2;
  static constexpr int top_scale = 63;
  static constexpr std::size_t scale_at = 0;

  static float choose(const float* values, int* codes) noexcept {
    const float scale = codes_of_largest<8, top_scale>(values, codes);
    limit(codes);
    return scale;
  }
  static void limit(int* codes) noexcept {
    for (std::size_t i = 0; i < 8; ++i) {
      codes[i] = std::min<int>(top_scale, byte_of(codes[i]));
    }
  }
  static void exchange(std::byte* block, int* scales, int* minima) noexcept {
    store_six_bit(scales, minima, block + 4);
    load_six_bit(block + 4, scales, minima);
  }
};

struct Q4_KLayout : SixBitLayout {
  static constexpr std::size_t block_bytes = 144;
  static constexpr bool limits_fitted = false;

  static void store_codes(const std::uint8_t* codes, std::byte* to) noexcept {
    for (std::size_t i = 0; i < run; ++i) {
      const std::uint64_t both = low_codes(codes, i) | high_codes(codes, i) << 4;
      for (std::size_t k = 0; k < 8; ++k) {
        to[k / 4 * block_bytes + 16 + 32 * (k % 4) + i] = byte_at(both, k);
      }
    }
  }
};

struct Q5_KLayout : SixBitLayout {
  static constexpr std::size_t block_bytes = 176;
  static constexpr bool limits_fitted = true;

  static void store_codes(const std::uint8_t* codes, std::byte* to) noexcept {
    for (std::size_t i = 0; i < run; ++i) {
      const std::uint64_t low = low_codes(codes, i);
      const std::uint64_t high = high_codes(codes, i);
      const std::uint64_t both = (low & each_byte(15)) | (high & each_byte(15)) << 4;
      for (std::size_t k = 0; k < 8; ++k) {
        to[k / 4 * block_bytes + 48 + 32 * (k % 4) + i] = byte_at(both, k);
      }
      // A byte collects the fifth bits of eight runs: 2 bits from each of 4 bytes of `fifths`.
      const std::uint64_t fifths = (low >> 4 & each_byte(1)) | (high >> 4 & each_byte(1)) << 1;
      const std::uint64_t joined = fifths | fifths >> 6 | fifths >> 12 | fifths >> 18;
      to[16 + i] = byte_at(joined, 0);
      to[block_bytes + 16 + i] = byte_at(joined, 4);
    }
  }
};

// ---- Q2_K, Q3_K, Q6_K: fields of two bits

// Stores two-bit codes, four per byte: the codes of runs k, k + 2, k + 4 and k + 6 of a half block.
inline void store_two_bits(std::uint64_t low, std::uint64_t high, std::size_t i,
                           std::byte* to) noexcept {
  const std::uint64_t pairs = low | high << 4;
  const std::uint64_t joined = pairs | pairs >> 14;
  to[i] = byte_at(joined, 0);
  to[16 + i] = byte_at(joined, 1);
  to[32 + i] = byte_at(joined, 4);
  to[48 + i] = byte_at(joined, 5);
}

struct Q2_KLayout {
  static constexpr std::size_t elements = k_elements;
  static constexpr std::size_t run = 16;
  static constexpr std::size_t block_bytes = 84;
  static constexpr std::size_t blocks = 1;
  static constexpr int top_scale = 15;
  static constexpr std::size_t scale_at = 80;
  static constexpr bool limits_fitted = false;

  static float choose(const float* values, int* codes) noexcept {
    return codes_of_largest<16, top_scale>(values, codes);
  }
  static void limit(int* /*codes*/) noexcept {}
  static void exchange(std::byte* block, int* scales, int* minima) noexcept {
    for (std::size_t i = 0; i < 16; ++i) {
      const std::uint8_t both = byte_of(scales[i] | minima[i] * 16);
      block[i] = std::byte{both};
      scales[i] = both & 15;
      minima[i] = both >> 4;
    }
  }
  static void store_codes(const std::uint8_t* codes, std::byte* to) noexcept {
    for (std::size_t i = 0; i < run; ++i) {
      store_two_bits(low_codes(codes, i), high_codes(codes, i), i, to + 16);
    }
  }
};

struct Q3_KLayout {
  static constexpr std::size_t elements = k_elements;
  static constexpr std::size_t run = 16;
  static constexpr std::size_t blocks = 1;
  static constexpr int middle = 4;
  static constexpr std::size_t block_bytes = 110;
  static constexpr std::size_t scale_at = 108;

  static float choose(const LaneNumbers& fitted, int* codes) noexcept {
    std::fill_n(codes, 16, -32);
    const float extreme = extreme_of(fitted.data(), 16);
    if (extreme == 0) return 0.0f;
    const float inverse = -32.0f / extreme;
    for (std::size_t i = 0; i < 16; ++i) {
      const auto code = static_cast<std::int8_t>(nearest_integer(inverse * fitted[i]));
      codes[i] = std::clamp<int>(code, -32, 31);
    }
    return 1 / inverse;
  }
  static void store_scales(const int* codes, std::byte* to) noexcept {
    std::fill_n(to + 96, 12, std::byte{});
    for (std::size_t i = 0; i < 16; ++i) {
      const int code = codes[i] + 32;
      to[96 + i % 8] |= std::byte(byte_of((code & 15) << (i < 8 ? 0 : 4)));
      to[104 + i % 4] |= std::byte(byte_of((code >> 4) << (2 * (i / 4))));
    }
  }
  static void store_codes(const std::uint8_t* codes, std::byte* to) noexcept {
    for (std::size_t i = 0; i < run; ++i) {
      const std::uint64_t low = low_codes(codes, i);
      const std::uint64_t high = high_codes(codes, i);
      store_two_bits(low & each_byte(3), high & each_byte(3), i, to + 32);
      // A byte collects the top bits of runs k, k + 2, ..., k + 14.
      const std::uint64_t tops = (low >> 2 & each_byte(1)) | (high >> 2 & each_byte(1)) << 2;
      const std::uint64_t halves = tops | tops >> 15;
      const std::uint64_t joined = halves | halves >> 28;
      to[i] = byte_at(joined, 0);
      to[16 + i] = byte_at(joined, 1);
    }
  }
};

struct Q6_KLayout {
  static constexpr std::size_t elements = k_elements;
  static constexpr std::size_t run = 16;
  static constexpr std::size_t blocks = 1;
  static constexpr int middle = 32;
  static constexpr std::size_t block_bytes = 210;
  static constexpr std::size_t scale_at = 208;

  static float choose(const LaneNumbers& fitted, int* codes) noexcept {
    const float inverse = -128.0f / extreme_of(fitted.data(), 16);
    for (std::size_t i = 0; i < 16; ++i) {
      codes[i] = static_cast<std::int8_t>(std::min(127, nearest_integer(inverse * fitted[i])));
    }
    return 1 / inverse;
  }
  static void store_scales(const int* codes, std::byte* to) noexcept {
    for (std::size_t i = 0; i < 16; ++i) to[192 + i] = std::byte(byte_of(codes[i]));
  }
  static void store_codes(const std::uint8_t* codes, std::byte* to) noexcept {
    for (std::size_t i = 0; i < run; ++i) {
      const std::uint64_t low = low_codes(codes, i);
      const std::uint64_t high = high_codes(codes, i);
      const std::uint64_t both = (low & each_byte(15)) | (high & each_byte(15)) << 4;
      for (std::size_t k = 0; k < 8; ++k) to[16 * k + i] = byte_at(both, k);
      store_two_bits(low >> 4 & each_byte(3), high >> 4 & each_byte(3), i, to + 128);
    }
  }
};

}  // namespace loadstone::simd
