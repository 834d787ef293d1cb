// The order of names in which expert 10 comes after expert 9.
#pragma once

#include <optional>
#include <string_view>

namespace loadstone {

// Negative, 0 or positive: runs of digits compare by value, all else byte by byte.
[[nodiscard]] int natural_order(std::string_view a, std::string_view b) noexcept;

// The number that the whole text stands for; nothing for other text, and above 2^32.
[[nodiscard]] std::optional<unsigned> whole_number(std::string_view text) noexcept;

}  // namespace loadstone
