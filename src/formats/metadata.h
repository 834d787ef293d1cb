// Values of GGUF metadata from and to bytes and JSON.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "base/json_writer.h"
#include "loadstone/catalog.h"

namespace loadstone {

// Returns the text of a key; null if it is absent or not a text.
[[nodiscard]] inline const std::string* find_text(const Metadata& metadata, std::string_view key) {
  const auto found = metadata.find(std::string(key));
  return found == metadata.end() ? nullptr : std::get_if<std::string>(&found->second.value);
}

// Bytes of one number or bool; 0 for strings and arrays, whose length varies.
[[nodiscard]] std::size_t byte_count(MetadataType type) noexcept;

// A number or bool from its little-endian bytes.
[[nodiscard]] MetadataValue number_value(MetadataType type, const std::byte* bytes);

// Appends the little-endian bytes of a number or bool. Returns false and appends nothing if the
// value does not fit its type. Rounds f32 to nearest; a finite float never becomes infinite.
[[nodiscard]] bool append_number(const MetadataValue& value, std::string& bytes);

// Returns true for a key that GGUF allows: printable ASCII, and not empty.
[[nodiscard]] bool is_metadata_key(std::string_view key) noexcept;

// Writes numbers, bools and texts as such, and arrays as arrays.
void write_json(JsonWriter& json, const MetadataValue& item);
[[nodiscard]] std::string json_of(const MetadataValue& item);

// The shortest text that is the same number again, in the width that the file has; nothing for an
// array.
[[nodiscard]] std::optional<std::string> text_of(const MetadataValue& item);

}  // namespace loadstone
