// JSON as Python's json module reads it: more than the standard allows, and more than simdjson
// takes.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace loadstone {

struct PythonJson {
  // JSON for simdjson, with the document's length and positions: NaN and numbers beyond doubles are
  // 0, integers beyond 64 bits are doubles, and half a surrogate pair is U+FFFD.
  std::string text;
  bool has_infinite = false;  // or NaN
  // The reason why Python rejects it too, and its offset.
  struct Fault {
    std::string_view message;
    std::size_t offset;
  };
  std::optional<Fault> fault;
};

[[nodiscard]] PythonJson python_json(std::string_view document);

}  // namespace loadstone
