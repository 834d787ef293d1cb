// Orders names so that expert 10 comes after expert 9.
#pragma once

#include <string_view>

namespace loadstone {

// Returns a negative value, 0 or a positive value. Runs of digits are compared by value, all other
// characters byte by byte.
[[nodiscard]] int natural_order(std::string_view a, std::string_view b) noexcept;

[[nodiscard]] inline bool natural_less(std::string_view a, std::string_view b) noexcept {
  return natural_order(a, b) < 0;
}

}  // namespace loadstone
