// Changes the order of codes of 4 bits between two adjacent codes per byte and GGUF's order, in
// which a byte contains the codes i and i + 16 of 32 codes, or i and i + 8 of 16 codes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace loadstone::nibbles {

inline constexpr std::uint64_t low_halves = 0x0f0f0f0f0f0f0f0fu;

// Returns a word with the four low bytes of `bytes` at its even positions.
[[nodiscard]] constexpr std::uint64_t spread(std::uint64_t bytes) noexcept {
  bytes &= 0xffffffffu;
  bytes = (bytes | bytes << 16) & 0x0000ffff0000ffffu;
  return (bytes | bytes << 8) & 0x00ff00ff00ff00ffu;
}

// Returns the four bytes at the even positions. Reverses spread().
[[nodiscard]] constexpr std::uint64_t gather(std::uint64_t bytes) noexcept {
  bytes &= 0x00ff00ff00ff00ffu;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
  return (bytes | bytes >> 16) & 0xffffffffu;
}

// Converts 32 adjacent codes to GGUF's order.
inline void to_gguf(const std::byte* codes, std::byte* to) noexcept {
  std::array<std::uint64_t, 2> halves;
  std::memcpy(halves.data(), codes, sizeof(halves));
  const std::uint64_t even = (halves[0] & low_halves) | (halves[1] & low_halves) << 4;
  const std::uint64_t odd = (halves[0] >> 4 & low_halves) | (halves[1] & ~low_halves);
  const std::array<std::uint64_t, 2> made = {spread(even) | spread(odd) << 8,
                                             spread(even >> 32) | spread(odd >> 32) << 8};
  std::memcpy(to, made.data(), sizeof(made));
}

// Reverses to_gguf().
inline void from_gguf(const std::byte* codes, std::byte* to) noexcept {
  std::array<std::uint64_t, 2> halves;
  std::memcpy(halves.data(), codes, sizeof(halves));
  const std::uint64_t even = gather(halves[0]) | gather(halves[1]) << 32;
  const std::uint64_t odd = gather(halves[0] >> 8) | gather(halves[1] >> 8) << 32;
  const std::array<std::uint64_t, 2> made = {(even & low_halves) | (odd & low_halves) << 4,
                                             (even >> 4 & low_halves) | (odd & ~low_halves)};
  std::memcpy(to, made.data(), sizeof(made));
}

// Converts 16 adjacent codes to GGUF's order.
inline void to_gguf_16(const std::byte* codes, std::byte* to) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, codes, sizeof(word));
  const std::uint64_t even = (word & low_halves) | (word >> 32 & low_halves) << 4;
  const std::uint64_t odd = (word >> 4 & low_halves) | (word >> 32 & ~low_halves);
  const std::uint64_t made = spread(even) | spread(odd) << 8;
  std::memcpy(to, &made, sizeof(made));
}

// Reverses to_gguf_16().
inline void from_gguf_16(const std::byte* codes, std::byte* to) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, codes, sizeof(word));
  const std::uint64_t even = gather(word);
  const std::uint64_t odd = gather(word >> 8);
  const std::uint64_t low = (even & low_halves) | (odd & low_halves) << 4;
  const std::uint64_t high = (even >> 4 & low_halves) | (odd & ~low_halves);
  const std::uint64_t made = low | high << 32;
  std::memcpy(to, &made, sizeof(made));
}

// Converts codes in two's complement, one per byte, to codes plus 8, two per byte. `count` is even.
inline void from_row_pair(const std::byte* from, std::uint64_t count, bool is_high,
                          std::byte* to) noexcept {
  const int shift = is_high ? 4 : 0;
  for (std::uint64_t i = 0; i < count; i += 2) {
    const std::byte low = from[i] >> shift & std::byte{15};
    const std::byte high = from[i + 1] >> shift << 4;
    to[i / 2] = (low | high) ^ std::byte{0x88};
  }
}

// Exchanges the two codes of each byte.
inline void swap_halves(const std::byte* codes, std::uint64_t bytes, std::byte* to) noexcept {
  for (std::uint64_t i = 0; i < bytes; ++i) to[i] = codes[i] << 4 | codes[i] >> 4;
}

}  // namespace loadstone::nibbles
