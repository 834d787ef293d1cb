// Generates inputs with the same integer arithmetic as the scripts of tests/golden, so the
// repository stores only fingerprints of results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace loadstone {

// Returns the pseudo-random word at index `place`.
inline std::uint64_t splitmix(std::uint64_t place, std::uint64_t seed) {
  std::uint64_t word = (place + 1) * 0x9e3779b97f4a7c15u + seed;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

// Returns the sum of (word + 1) * (odd word of its index) over all 8-byte words.
inline std::uint64_t fingerprint(const std::vector<std::byte>& bytes) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < bytes.size() / 8; ++i) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + 8 * i, 8);
    sum += (word + 1) * (splitmix(i, 99) | 1);
  }
  return sum;
}

}  // namespace loadstone
