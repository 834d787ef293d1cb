// The place in a GGUF file that is being read: what stands there, and what to say when it is wrong.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "formats/file_header.h"
#include "formats/header_reader.h"

namespace loadstone {

// Not thread-safe.
class GgufCursor final : private HeaderReader::AtEnd {
 public:
  explicit GgufCursor(ByteSource& source);

  struct Problem {
    const char* code;
    std::string message;
    std::string_view field;
    std::string found;
    std::string expected;
  };
  // Adds the file, the key or tensor at hand, and where it stands.
  [[noreturn]] void refuse(Problem problem) const;
  // The file ends before what `reading` names is complete.
  [[noreturn]] void file_ends(std::uint64_t wanted_bytes) override;

  template <typename Number>
  Number number() {
    at = reader.offset();
    return reader.number<Number>();
  }
  // The count of things that take at least `each_bytes`, checked against the file. What no file of
  // this size can hold is a lie and gets `code`; what merely reaches past the end is a file that
  // was cut.
  std::uint64_t length(std::string_view field, const char* code, std::uint64_t each_bytes = 1);

  ByteSource& source;
  HeaderReader reader;
  Warnings warnings;
  std::string culprit;              // key or tensor at hand
  std::string reading;              // for file_ends()
  std::string_view field = "file";  // the same
  std::uint64_t at = 0;             // where what is checked now begins
};

// Text, or bytes that are no text with escapes.
[[nodiscard]] std::string printable_bytes(std::string_view text);

}  // namespace loadstone
