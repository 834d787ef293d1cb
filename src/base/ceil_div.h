#pragma once

#include <cstdint>

namespace loadstone {

// Returns a / b, rounded up. Does not overflow for any `a`.
[[nodiscard]] constexpr std::uint64_t ceil_div(std::uint64_t a, std::uint64_t b) noexcept {
  return a / b + (a % b != 0 ? 1u : 0u);
}

// Returns the smallest multiple of `unit` that is at least `a`.
[[nodiscard]] constexpr std::uint64_t round_up(std::uint64_t a, std::uint64_t unit) noexcept {
  return ceil_div(a, unit) * unit;
}

}  // namespace loadstone
