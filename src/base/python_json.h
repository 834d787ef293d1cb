// JSON as Python's json module writes it, with words that JSON does not have.
#pragma once

#include <string>
#include <string_view>

namespace loadstone {

// The text with numbers in the place of the words Infinity and NaN, as long as before, so that it
// can be parsed and positions stay. Strings are left alone.
[[nodiscard]] std::string without_number_words(std::string_view text);

}  // namespace loadstone
