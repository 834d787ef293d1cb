// Tables of the values of 4-bit codes, for decoders and encoders of GGUF formats.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "kernels/number.h"

namespace loadstone::simd {

using Table = std::array<std::int8_t, 16>;

alignas(16) inline constexpr Table iq4_values = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                 1,    13,   25,  38,  53,  69,  89,  113};
// The values of E2M1, doubled. The code of -0 has the value 0.
alignas(16) inline constexpr Table e2m1_doubled = {0, 1,  2,  3,  4,  6,  8,  12,
                                                   0, -1, -2, -3, -4, -6, -8, -12};

// Returns half of the power of two that an E8M0 byte encodes. 0xff is not NaN here.
constexpr float half_of_e8m0(std::uint8_t byte) noexcept {
  const std::uint32_t bits = byte < 2 ? 0x00200000u << byte : (byte - 1u) << 23;
  return std::bit_cast<float>(bits);
}

// Returns half of the value of an E4M3 byte without its sign. As in ggml, 0x7f is 0 instead of NaN,
// and 0xff is the value after the largest one.
constexpr float half_of_ue4m3(std::uint8_t byte) noexcept {
  if (byte == 0x7f) return 0.0f;
  if (byte == 0xff) return 240.0f;
  return std::bit_cast<float>(number::f32_from_f8_e4m3(byte & 0x7f)) * 0.5f;
}

}  // namespace loadstone::simd
