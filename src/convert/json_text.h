// Reads and changes members of a JSON object in its text, so that all other text stays unchanged.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Returns true if the text is one object that python_json() accepts.
[[nodiscard]] bool is_json_object(std::string_view text);

// Returns the sorted keys whose values differ between two objects, or that only one object has.
// Ignores spaces and order. Both texts must satisfy is_json_object().
[[nodiscard]] std::vector<std::string> different_members(std::string_view left,
                                                         std::string_view right);

// Returns the string, number or bool at a JSON pointer such as "/architectures/0"; nullopt if the
// value is absent or has a different type.
template <typename Value>
[[nodiscard]] std::optional<Value> value_at(std::string_view text, const std::string& pointer);
// Returns the value of a top-level string member; empty if it is absent or not a string.
[[nodiscard]] std::string string_member(std::string_view text, std::string_view key);
// Returns true for the config of a model of diffusers.
[[nodiscard]] bool is_config_of_diffusers(std::string_view text);
// Returns the JSON text of a member that is an object. `text` must satisfy is_json_object().
[[nodiscard]] std::string_view object_member(std::string_view text, std::string_view key);
[[nodiscard]] bool has_member(std::string_view text, std::string_view key);

// Returns the object with this JSON value for the key: replaces the member, or adds it at the end.
// `text` must satisfy is_json_object().
[[nodiscard]] std::string with_member(std::string_view text, std::string_view key,
                                      std::string_view value);
// Returns the object with values replaced by `change`, also in nested objects. `change` gets a key
// and the text of its value, and returns the new text; nullopt keeps the value.
[[nodiscard]] std::string with_changes(
    std::string_view text,
    const std::function<std::optional<std::string>(std::string_view, std::string_view)>& change);
// Returns the object without the members for which `drops(key, level)` is true. Level 0 is the
// object itself; nested objects and arrays are visited down to level `levels`.
[[nodiscard]] std::string without_members(
    std::string_view text, const std::function<bool(std::string_view, unsigned)>& drops,
    unsigned levels);

}  // namespace loadstone
