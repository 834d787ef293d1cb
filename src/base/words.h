// Handles ASCII words, and lists of words that are stored as one string: "a b c".
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

namespace loadstone {

// Returns the text with ASCII letters in lower case, regardless of the locale.
[[nodiscard]] inline std::string lowered(std::string_view text) {
  std::string lower(text);
  for (char& each : lower) {
    if (each >= 'A' && each <= 'Z') each = static_cast<char>(each - 'A' + 'a');
  }
  return lower;
}

template <typename Wanted>
[[nodiscard]] constexpr bool any_word(std::string_view words, Wanted is_wanted) {
  while (!words.empty()) {
    const std::size_t end = std::min(words.find(' '), words.size());
    if (is_wanted(words.substr(0, end))) return true;
    words.remove_prefix(std::min(end + 1, words.size()));
  }
  return false;
}

template <typename Use>
constexpr void for_each_word(std::string_view words, Use use) {
  static_cast<void>(any_word(words, [&](std::string_view word) { return use(word), false; }));
}

// Return true if the name is one of the words, or contains, begins with or ends with one of them.
[[nodiscard]] constexpr bool is_word(std::string_view name, std::string_view words) {
  return any_word(words, [&](std::string_view word) { return name == word; });
}
[[nodiscard]] constexpr bool has_word(std::string_view name, std::string_view words) {
  return any_word(words, [&](std::string_view word) { return name.find(word) != name.npos; });
}
[[nodiscard]] constexpr bool starts_with_word(std::string_view name, std::string_view words) {
  return any_word(words, [&](std::string_view word) { return name.starts_with(word); });
}
[[nodiscard]] constexpr bool ends_with_word(std::string_view name, std::string_view words) {
  return any_word(words, [&](std::string_view word) { return name.ends_with(word); });
}

}  // namespace loadstone
