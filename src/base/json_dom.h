#pragma once

#include <simdjson.h>

#include <new>
#include <optional>
#include <string_view>

namespace loadstone {

namespace dom = simdjson::dom;

// Returns the parser's result, whose error the caller may ignore. Throws std::bad_alloc if memory
// runs out.
[[nodiscard]] inline simdjson::simdjson_result<dom::element> parsed_json(dom::parser& parser,
                                                                         std::string_view text) {
  const auto result = parser.parse(text.data(), text.size());
  if (result.error() == simdjson::MEMALLOC) throw std::bad_alloc();
  return result;
}

// Returns nullopt if the element or a requested member is missing or has a different type.
template <typename Value>
[[nodiscard]] std::optional<Value> json_as(const auto& found) {
  Value value{};
  return found.get(value) == simdjson::SUCCESS ? std::optional(value) : std::nullopt;
}

}  // namespace loadstone
