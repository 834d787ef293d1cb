// Converts values of GGUF metadata from and to bytes and JSON.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "base/json_writer.h"
#include "loadstone/catalog.h"

namespace loadstone {

// Returns the string value of a key; null if the key is absent or its value is not a string.
[[nodiscard]] inline const std::string* find_text(const Metadata& metadata, std::string_view key) {
  const auto found = metadata.find(std::string(key));
  return found == metadata.end() ? nullptr : std::get_if<std::string>(&found->second.value);
}

// Returns the size of a number or bool in bytes; 0 for strings and arrays, whose length varies.
[[nodiscard]] std::size_t byte_count(MetadataType type) noexcept;

// Converts little-endian bytes to a number or bool.
[[nodiscard]] MetadataValue number_value(MetadataType type, const std::byte* bytes);

// Appends the little-endian bytes of a number or bool. Returns false and appends nothing if the
// value does not fit its type. Rounds f32 to nearest; a finite float never becomes infinite.
[[nodiscard]] bool append_number(const MetadataValue& value, std::string& bytes);

// Returns true for a key that GGUF allows: printable ASCII, and not empty.
[[nodiscard]] bool is_metadata_key(std::string_view key) noexcept;

// Writes the value as a JSON number, bool, string or array.
void write_json(JsonWriter& json, const MetadataValue& item);
[[nodiscard]] std::string json_of(const MetadataValue& item);

// Returns the value as text; nullopt for an array. A float becomes the shortest text that parses to
// the same float in its width (f32 or f64).
[[nodiscard]] std::optional<std::string> text_of(const MetadataValue& item);

}  // namespace loadstone
