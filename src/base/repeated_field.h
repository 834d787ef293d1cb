// Repeated fields of a JSON object: Python's json uses the last one, other readers the first.
#pragma once

#include <simdjson.h>

#include <optional>
#include <string>

namespace loadstone {

// Returns the first repeated field, at any depth: "rank_pattern.q_proj", with indices of array
// items.
[[nodiscard]] std::optional<std::string> repeated_field(const simdjson::dom::element& element);

}  // namespace loadstone
