// Helpers of encoders for codes: rounding, and packing of eight codes at a time.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/number.h"

namespace loadstone::simd {

constexpr std::uint64_t each_byte(std::uint64_t value) noexcept {
  return value * 0x0101010101010101u;
}

// Returns eight codes as one word, with the first code in the lowest byte.
inline std::uint64_t eight_codes(const std::uint8_t* codes) noexcept {
  std::uint64_t word = 0;
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(&word, codes, sizeof(word));
  } else {
    for (std::size_t i = 0; i < 8; ++i) word |= std::uint64_t{codes[i]} << (8 * i);
  }
  return word;
}

// Returns the lowest bits of all bytes as one byte. The lowest byte's bit is the lowest bit.
constexpr std::byte gathered_bits(std::uint64_t word) noexcept {
  return static_cast<std::byte>((word & each_byte(1)) * 0x0102040810204080u >> 56);
}

inline void store_f16(std::byte* to, float value) noexcept {
  number::store_raw(to, number::f16_from_f32(std::bit_cast<std::uint32_t>(value)));
}

// Returns the nearest integer, ties to even, if |value| < 2^22, and otherwise the result of ggml.
inline int nearest_integer(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value + 12582912.0f);
  return static_cast<int>(bits & 0x7fffffu) - 0x400000;
}

constexpr std::uint8_t byte_of(int value) noexcept { return static_cast<std::uint8_t>(value); }

}  // namespace loadstone::simd
