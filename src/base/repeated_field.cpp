#include "base/repeated_field.h"

#include <fmt/format.h>

#include <cstddef>
#include <set>
#include <string_view>

namespace loadstone {

std::optional<std::string> repeated_field(const simdjson::dom::element& element) {
  const auto in = [](const std::string& key, const simdjson::dom::element& value) {
    auto found = repeated_field(value);
    if (found) found = key + "." + *found;
    return found;
  };
  simdjson::dom::object object;
  if (element.get(object) == simdjson::SUCCESS) {
    std::set<std::string_view> known;
    for (const auto field : object) {
      if (!known.insert(field.key).second) return std::string(field.key);
      if (auto found = in(std::string(field.key), field.value)) return found;
    }
    return std::nullopt;
  }
  simdjson::dom::array array;
  if (element.get(array) != simdjson::SUCCESS) return std::nullopt;
  std::size_t number = 0;
  for (const auto item : array) {
    if (auto found = in(fmt::format("{}", number++), item)) return found;
  }
  return std::nullopt;
}

}  // namespace loadstone
