// Calculates with untrusted integers: an overflow yields nullopt or the largest value, and never
// wraps.
#pragma once

#include <cstdint>
#include <optional>

namespace loadstone {

[[nodiscard]] inline std::optional<std::uint64_t> checked_add(std::uint64_t a,
                                                              std::uint64_t b) noexcept {
  std::uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) return std::nullopt;
  return sum;
}

[[nodiscard]] inline std::optional<std::uint64_t> checked_mul(std::uint64_t a,
                                                              std::uint64_t b) noexcept {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::nullopt;
  return product;
}

// Returns a * b + c.
[[nodiscard]] inline std::optional<std::uint64_t> checked_mul_add(std::uint64_t a, std::uint64_t b,
                                                                  std::uint64_t c) noexcept {
  const auto product = checked_mul(a, b);
  return product ? checked_add(*product, c) : std::nullopt;
}

// Returns UINT64_MAX on overflow, which suffices for an upper bound.
[[nodiscard]] inline std::uint64_t saturating_add(std::uint64_t a, std::uint64_t b) noexcept {
  return checked_add(a, b).value_or(UINT64_MAX);
}

[[nodiscard]] inline std::uint64_t saturating_mul(std::uint64_t a, std::uint64_t b) noexcept {
  return checked_mul(a, b).value_or(UINT64_MAX);
}

}  // namespace loadstone
