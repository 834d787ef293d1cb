// Text for people: names made safe to print, numbers and sizes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace loadstone {

// The URL without user and password.
[[nodiscard]] std::string without_user(std::string_view url);
// A server's location, without query and fragment as well, whatever its scheme.
[[nodiscard]] std::string public_location(std::string_view location);

// Returns the text without possible secrets in its URLs: user, password, query and fragment, for
// any scheme, and for mistyped ones such as "http:/host". A URL ends at the quotes around it,
// otherwise at a space; a text that begins with one is a URL to its end. For display only: an
// object's name in a bucket may contain "?", so the result is not a path to open.
[[nodiscard]] std::string without_secrets(std::string_view text);

// without_secrets(), with control characters, line separators, changes of writing direction,
// invisible characters and bytes that are not UTF-8 as escapes, so that a name from a file can
// neither steer a terminal nor split a line; long names are cut in the middle, with their length.
[[nodiscard]] std::string printable(std::string_view text, std::size_t length_max = 200);

// JSON as a terminal may get it: invisible characters and those that steer, which can only be in
// strings, as escapes of JSON, so that a program reads the same document. ASCII is left alone.
[[nodiscard]] std::string visible_json(std::string_view text);

// "'a', 'b' and 3 more": the first of `count` names, of which fewer may be at hand.
[[nodiscard]] std::string name_list(std::span<const std::string> names, std::uint64_t count,
                                    std::size_t shown_max = 8);
[[nodiscard]] inline std::string name_list(std::span<const std::string> names) {
  return name_list(names, names.size());
}
// "a, b or c"
[[nodiscard]] std::string either(std::span<const std::string> words);
// "1 tensor", "2 tensors"
[[nodiscard]] std::string counted(std::uint64_t count, std::string_view thing);

[[nodiscard]] inline std::string_view as_text(std::span<const std::byte> bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// "91.0 MB", "1.3 GiB" is never mixed: decimal units, as file managers and disks use.
[[nodiscard]] std::string human_bytes(std::uint64_t bytes);

[[nodiscard]] constexpr bool is_digit(char character) noexcept {
  return character >= '0' && character <= '9';
}
// Returns true if the text is one or more digits.
[[nodiscard]] constexpr bool is_digits(std::string_view text) noexcept {
  return !text.empty() && std::ranges::all_of(text, is_digit);
}

// "64MiB", "5GB", "4097B": no digit is lost, and parse_bytes() reads it.
[[nodiscard]] std::string exact_bytes(std::uint64_t bytes);

// "8GiB", "500MB", "1.5 GB", "4096": nothing when it is not a size.
[[nodiscard]] bool parse_bytes(std::string_view text, std::uint64_t& bytes);

struct Character {
  std::uint32_t code;
  std::size_t bytes;
};
// Returns the first character of non-empty text; one of no bytes if it is not well-formed UTF-8.
[[nodiscard]] Character first_character(std::string_view text) noexcept;

// Returns true for well-formed UTF-8.
[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

}  // namespace loadstone
