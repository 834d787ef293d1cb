#include "support/sha256.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

namespace loadstone::test {

namespace {

using Word = std::uint32_t;

// Returns the first 32 fractional bits of the `root`-th roots of the first primes.
template <std::size_t count>
std::array<Word, count> fractions_of_primes(long double root) {
  std::array<Word, count> words{};
  std::size_t found = 0;
  for (unsigned number = 2; found < count; ++number) {
    bool is_prime = true;
    for (unsigned k = 2; k * k <= number; ++k) is_prime = is_prime && number % k != 0;
    if (!is_prime) continue;
    const long double value = std::pow(static_cast<long double>(number), 1 / root);
    words[found++] = static_cast<Word>((value - std::floor(value)) * 4294967296.0L);
  }
  return words;
}

void add_chunk(std::array<Word, 8>& state, const std::uint8_t* chunk) {
  static const auto constants = fractions_of_primes<64>(3);
  std::array<Word, 64> words{};
  for (std::size_t i = 0; i < 64; ++i) {
    if (i < 16) {
      for (std::size_t k = 0; k < 4; ++k) words[i] = words[i] << 8 | chunk[4 * i + k];
      continue;
    }
    const Word early = words[i - 15];
    const Word late = words[i - 2];
    words[i] = words[i - 16] + words[i - 7] +
               (std::rotr(early, 7) ^ std::rotr(early, 18) ^ early >> 3) +
               (std::rotr(late, 17) ^ std::rotr(late, 19) ^ late >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (std::size_t i = 0; i < 64; ++i) {
    const Word first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                       ((e & f) ^ (~e & g)) + constants[i] + words[i];
    const Word second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const std::array<Word, 8> added = {a, b, c, d, e, f, g, h};
  for (std::size_t i = 0; i < 8; ++i) state[i] += added[i];
}

}  // namespace

std::string sha256(std::span<const std::byte> bytes) {
  std::vector<std::uint8_t> text;
  for (const std::byte byte : bytes) text.push_back(std::to_integer<std::uint8_t>(byte));
  text.push_back(0x80);
  while (text.size() % 64 != 56) text.push_back(0);
  const std::uint64_t bits = 8 * std::uint64_t{bytes.size()};
  for (unsigned shift = 64; shift > 0; shift -= 8) {
    text.push_back(static_cast<std::uint8_t>(bits >> (shift - 8)));
  }
  std::array<Word, 8> state = fractions_of_primes<8>(2);
  for (std::size_t at = 0; at < text.size(); at += 64) add_chunk(state, text.data() + at);
  std::string hex;
  for (const Word word : state) {
    for (unsigned shift = 32; shift > 0; shift -= 4) {
      hex += "0123456789abcdef"[word >> (shift - 4) & 15u];
    }
  }
  return hex;
}

}  // namespace loadstone::test
