// An order of names that sorts expert 10 after expert 9.
#pragma once

#include <string_view>

namespace loadstone {

// Negative, 0 or positive: runs of digits compare by value, all else byte by byte.
[[nodiscard]] int natural_order(std::string_view a, std::string_view b) noexcept;

[[nodiscard]] inline bool natural_less(std::string_view a, std::string_view b) noexcept {
  return natural_order(a, b) < 0;
}

}  // namespace loadstone
