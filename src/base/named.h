// Closed enums and their names. For each of them name() is an exhaustive switch, so a forgotten
// enumerator does not compile, and is empty for what is no enumerator.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Nothing where no enumerator has this name.
template <typename Enum>
[[nodiscard]] std::optional<Enum> from_name(std::string_view text) noexcept {
  for (unsigned i = 0; !name(static_cast<Enum>(i)).empty(); ++i) {
    if (name(static_cast<Enum>(i)) == text) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

// The names of all enumerators, or of those that are `wanted`.
template <typename Enum, typename Wanted>
[[nodiscard]] std::vector<std::string> names_of(Wanted wanted) {
  std::vector<std::string> names;
  for (unsigned i = 0; !name(static_cast<Enum>(i)).empty(); ++i) {
    if (wanted(static_cast<Enum>(i))) names.emplace_back(name(static_cast<Enum>(i)));
  }
  return names;
}
template <typename Enum>
[[nodiscard]] std::vector<std::string> names_of() {
  return names_of<Enum>([](Enum) { return true; });
}

}  // namespace loadstone
