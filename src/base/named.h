// Maps closed enums to their names. Each enum has a complete table for name(), so a missing
// enumerator does not compile. name() is empty for a value that is not an enumerator.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

template <auto value>
consteval bool is_enumerator() {
  // Ends with "[... = loadstone::Origin::tie]" for an enumerator, otherwise "[... =
  // (loadstone::Origin)9]".
  const std::string_view text = __PRETTY_FUNCTION__;
  return text[text.find("= ") + 2] != '(';
}

// Implements name() for an enum whose enumerators count from 0. `names` has their names in order.
template <typename Enum, std::size_t count>
[[nodiscard]] constexpr std::string_view name_among(const std::string_view (&names)[count],
                                                    Enum value) noexcept {
  static_assert(is_enumerator<static_cast<Enum>(count - 1)>() &&
                !is_enumerator<static_cast<Enum>(count)>());
  const auto index = static_cast<std::size_t>(value);
  return index < count ? names[index] : std::string_view();
}

// Returns nullopt if no enumerator has this name.
template <typename Enum>
[[nodiscard]] std::optional<Enum> from_name(std::string_view text) noexcept {
  for (unsigned i = 0; !name(static_cast<Enum>(i)).empty(); ++i) {
    if (name(static_cast<Enum>(i)) == text) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

// Returns the names of all enumerators for which `wanted` is true.
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
