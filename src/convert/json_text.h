// Members of a JSON object as text: read, and changed in place, so that all else stays as its
// author wrote it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Whether the text is one object of python_json().
[[nodiscard]] bool is_json_object(std::string_view text);

// Returns the keys of two objects for which they have different values, or one has none, sorted.
// Spaces and the order of members do not count. Both must be such that is_json_object().
[[nodiscard]] std::vector<std::string> different_members(std::string_view left,
                                                         std::string_view right);

// The text, number or bool that a JSON pointer finds, "/architectures/0"; nothing if it is absent,
// or it has a different type.
template <typename Value>
[[nodiscard]] std::optional<Value> value_at(std::string_view text, const std::string& pointer);
// A text of the object itself; empty where it is absent or something else.
[[nodiscard]] std::string string_member(std::string_view text, std::string_view key);
// The text of an object. `text` must be one that is_json_object().
[[nodiscard]] std::string_view object_member(std::string_view text, std::string_view key);
[[nodiscard]] bool has_member(std::string_view text, std::string_view key);

// The object with this value, which is JSON, for the key: in place of the old one, or last. It must
// be one that is_json_object().
[[nodiscard]] std::string with_member(std::string_view text, std::string_view key,
                                      std::string_view value);
// The object with the values that `change` returns for members, in objects of the object too. It
// gets a key and the text of its value; nothing leaves that value as it is.
[[nodiscard]] std::string with_changes(
    std::string_view text,
    const std::function<std::optional<std::string>(std::string_view, std::string_view)>& change);
// The object without the members that `drops` names by key and level: 0 is the object itself, and
// what is in objects and arrays in it is looked at down to `levels`.
[[nodiscard]] std::string without_members(
    std::string_view text, const std::function<bool(std::string_view, unsigned)>& drops,
    unsigned levels);

}  // namespace loadstone
