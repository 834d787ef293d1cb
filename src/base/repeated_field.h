// Fields that a JSON object gives twice: Python's json takes the last one, other readers the first.
#pragma once

#include <simdjson.h>

#include <optional>
#include <string>

namespace loadstone {

// The first field that an object gives twice, at whatever depth: "rank_pattern.q_proj", with the
// numbers of items in arrays.
[[nodiscard]] std::optional<std::string> repeated_field(const simdjson::dom::element& element);

}  // namespace loadstone
