// Finds repeated fields of a JSON object, which are ambiguous: Python's json uses the last one,
// other readers the first.
#pragma once

#include <simdjson.h>

#include <optional>
#include <string>

namespace loadstone {

// Returns the path of the first repeated field at any depth, such as "rank_pattern.q_proj". Array
// items are given by index.
[[nodiscard]] std::optional<std::string> repeated_field(const simdjson::dom::element& element);

}  // namespace loadstone
