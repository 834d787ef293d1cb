// Members of a JSON object as text: read, and changed in place, so that everything else stays as
// written.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Returns true if the text is one object of python_json().
[[nodiscard]] bool is_json_object(std::string_view text);

// Returns the keys whose values differ between two objects, or that only one has, sorted. Ignores
// spaces and order. Both texts must satisfy is_json_object().
[[nodiscard]] std::vector<std::string> different_members(std::string_view left,
                                                         std::string_view right);

// Returns the text, number or bool at a JSON pointer such as "/architectures/0"; nullopt if it is
// absent or has another type.
template <typename Value>
[[nodiscard]] std::optional<Value> value_at(std::string_view text, const std::string& pointer);
// Returns a string member of the object itself; empty if it is absent or not a string.
[[nodiscard]] std::string string_member(std::string_view text, std::string_view key);
// Returns the text of an object member. `text` must satisfy is_json_object().
[[nodiscard]] std::string_view object_member(std::string_view text, std::string_view key);
[[nodiscard]] bool has_member(std::string_view text, std::string_view key);

// Returns the object with this JSON value for the key: replaced, or added last. `text` must satisfy
// is_json_object().
[[nodiscard]] std::string with_member(std::string_view text, std::string_view key,
                                      std::string_view value);
// Returns the object with values replaced by `change`, also in nested objects. It gets a key and
// the text of its value; nullopt keeps the value.
[[nodiscard]] std::string with_changes(
    std::string_view text,
    const std::function<std::optional<std::string>(std::string_view, std::string_view)>& change);
// Returns the object without the members that `drops` selects by key and level: level 0 is the
// object itself, and nested objects and arrays are visited down to `levels`.
[[nodiscard]] std::string without_members(
    std::string_view text, const std::function<bool(std::string_view, unsigned)>& drops,
    unsigned levels);

}  // namespace loadstone
