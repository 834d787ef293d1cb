// Members of a JSON object as text: read, and changed in place, so that all else stays as its
// author wrote it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace loadstone {

// Whether the text is one JSON object.
[[nodiscard]] bool is_json_object(std::string_view text);

// Of the object itself; empty or nothing where it is absent or something else.
[[nodiscard]] std::string string_member(std::string_view text, std::string_view key);
[[nodiscard]] std::optional<std::uint64_t> number_member(std::string_view text,
                                                         std::string_view key);
[[nodiscard]] bool has_member(std::string_view text, std::string_view key);

// The object with this value, which is JSON, for the key: in place of the old one, or last. It must
// be one that is_json_object().
[[nodiscard]] std::string with_member(std::string_view text, std::string_view key,
                                      std::string_view value);
// The object without the key.
[[nodiscard]] std::string without_member(std::string_view text, std::string_view key);

}  // namespace loadstone
