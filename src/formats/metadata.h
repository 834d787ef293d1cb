// How the values of GGUF metadata are made from their bytes, and become bytes and JSON.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "base/json_writer.h"
#include "loadstone/catalog.h"

namespace loadstone {

// The text of a key; null if there is none, or its value is not text.
[[nodiscard]] inline const std::string* find_text(const Metadata& metadata, std::string_view key) {
  const auto found = metadata.find(std::string(key));
  return found == metadata.end() ? nullptr : std::get_if<std::string>(&found->second.value);
}

// Bytes of one number or bool; 0 for strings and arrays, whose length varies.
[[nodiscard]] std::size_t byte_count(MetadataType type) noexcept;

// A number or bool from its little-endian bytes.
[[nodiscard]] MetadataValue number_value(MetadataType type, const std::byte* bytes);

// Appends the little-endian bytes of a number or bool. False: nothing was appended, because the
// value is of another kind than its type says, or does not fit it. Floats of f32 are rounded to the
// nearest; a finite one never becomes infinite.
[[nodiscard]] bool append_number(const MetadataValue& value, std::string& bytes);

// Whether GGUF takes the key: printable ASCII, and not empty.
[[nodiscard]] bool is_metadata_key(std::string_view key) noexcept;

// Numbers, bools and text as what they are, arrays as arrays.
void write_json(JsonWriter& json, const MetadataValue& item);
[[nodiscard]] std::string json_of(const MetadataValue& item);

// The shortest text that is the same number again, in the width that the file has; nothing for an
// array.
[[nodiscard]] std::optional<std::string> text_of(const MetadataValue& item);

}  // namespace loadstone
