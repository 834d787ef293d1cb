#include "base/repeated_field.h"

#include <fmt/format.h>

#include <cstddef>
#include <set>

#include "base/json_dom.h"
#include "base/python_json.h"
#include "loadstone/error.h"

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

void refuse_repeated_fields(std::string_view config, const std::string& path) {
  simdjson::dom::parser parser;
  simdjson::dom::element root;
  if (parsed_json(parser, without_number_words(config)).get(root) != simdjson::SUCCESS) return;
  if (auto field = repeated_field(root)) {
    throw Error("q.config", "a field is given twice, and readers disagree about which one counts",
                {.path = path, .field = *std::move(field), .expected = "one of the two"});
  }
}

}  // namespace loadstone
