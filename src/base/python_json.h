// Reads JSON as Python's json module does, which accepts more than the standard and more than
// simdjson.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace loadstone {

struct PythonJson {
  // Equivalent JSON for simdjson, with the same length and offsets. NaN and numbers outside the
  // range of double become 0, integers of more than 64 bits become doubles, and a lone surrogate
  // becomes U+FFFD.
  std::string text;
  bool has_infinite = false;  // true for NaN too
  // The reason why Python also rejects the text, and its offset.
  struct Fault {
    std::string_view message;
    std::size_t offset;
  };
  std::optional<Fault> fault;
};

[[nodiscard]] PythonJson python_json(std::string_view document);

}  // namespace loadstone
