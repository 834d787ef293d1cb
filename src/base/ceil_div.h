#pragma once

#include <cstdint>

namespace loadstone {

// Rounded up, for any `a`.
[[nodiscard]] constexpr std::uint64_t ceil_div(std::uint64_t a, std::uint64_t b) noexcept {
  return a / b + (a % b != 0 ? 1u : 0u);
}

}  // namespace loadstone
