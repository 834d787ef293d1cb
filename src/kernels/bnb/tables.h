// The values of the nf4 and fp4 codes, and the thresholds between codes.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/bnb.h"

namespace loadstone::simd {

inline constexpr std::array<float, 16> nf4_values = {
    -1.0f,
    -0.6961928009986877f,
    -0.5250730514526367f,
    -0.39491748809814453f,
    -0.28444138169288635f,
    -0.18477343022823334f,
    -0.09105003625154495f,
    0.0f,
    0.07958029955625534f,
    0.16093020141124725f,
    0.24611230194568634f,
    0.33791524171829224f,
    0.44070982933044434f,
    0.5626170039176941f,
    0.7229568362236023f,
    1.0f,
};

// Codes are a sign and three bits. The code of -0 has the value +0, too.
inline constexpr std::array<float, 16> fp4_values = {
    0.0f, 0.0625f / 12,  8.0f / 12,  1.0f,  4.0f / 12,  6.0f / 12,  2.0f / 12,  3.0f / 12,
    0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -6.0f / 12, -2.0f / 12, -3.0f / 12,
};

constexpr const std::array<float, 16>& codebook(Bnb4Code code) noexcept {
  return code == Bnb4Code::nf4 ? nf4_values : fp4_values;
}

// A value has the code `codes[n]` if n of the ascending thresholds are less than it.
struct Ranks {
  std::array<float, 15> thresholds{};
  std::array<std::uint8_t, 16> codes{};
};

// Thresholds are the midpoints between neighbouring values. A midpoint itself gets the lower value.
constexpr Ranks ranks_by_middles(const std::array<float, 16>& values,
                                 const std::array<std::uint8_t, 16>& codes) noexcept {
  Ranks ranks{.codes = codes};
  for (std::size_t i = 0; i < 15; ++i) {
    ranks.thresholds[i] = (values[codes[i]] + values[codes[i + 1]]) / 2;
  }
  return ranks;
}

// Returns the largest float below `value`, which is negative or 0.
constexpr float next_below(float value) noexcept {
  if (value == 0.0f) return -std::bit_cast<float>(1u);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) + 1);
}

// CUDA compares the magnitude with constants that are rounded to a few decimal digits, and then
// adds the sign. So positive and negative ties both go to the code nearer to zero.
constexpr Ranks fp4_ranks_of_cuda() noexcept {
  constexpr std::array<float, 7> pivots = {0.00260417f, 0.0859375f, 0.20833333f, 0.29166667f,
                                           0.4166667f,  0.583333f,  0.8333333f};
  Ranks ranks{.codes = {11, 10, 13, 12, 15, 14, 9, 8, 0, 1, 6, 7, 4, 5, 2, 3}};
  for (std::size_t i = 0; i < 7; ++i) {
    ranks.thresholds[6 - i] = next_below(-pivots[i]);
    ranks.thresholds[8 + i] = pivots[i];
  }
  ranks.thresholds[7] = next_below(0.0f);
  return ranks;
}

inline constexpr Ranks nf4_ranks =
    ranks_by_middles(nf4_values, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15});
inline constexpr Ranks fp4_ranks =
    ranks_by_middles(fp4_values, {11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3});
inline constexpr Ranks fp4_cuda_ranks = fp4_ranks_of_cuda();

constexpr const Ranks& ranks_of(const Bnb4& form) noexcept {
  if (form.code == Bnb4Code::nf4) return nf4_ranks;
  return form.dialect == BnbDialect::cpu ? fp4_ranks : fp4_cuda_ranks;
}

}  // namespace loadstone::simd
