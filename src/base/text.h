// Formats text for people: names that are safe to print, numbers and sizes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace loadstone {

// Returns the URL without user and password.
[[nodiscard]] std::string without_user(std::string_view url);
// Returns the location of a server without user, password, query and fragment, for any scheme.
[[nodiscard]] std::string public_location(std::string_view location);

// Returns the text without possible secrets in its URLs: user, password, query and fragment.
// Applies to any scheme, and to mistyped ones such as "http:/host". A quoted URL ends at the quote,
// any other at a space; if the text begins with a URL, all of it is the URL. For display only: the
// name of an object in a bucket may contain "?", so the result is not a path that can be opened.
[[nodiscard]] std::string without_secrets(std::string_view text);

// Returns without_secrets() with escapes for control characters, line separators, changes of
// writing direction, invisible characters and invalid UTF-8, so that a name from a file can neither
// control a terminal nor split a line. A long name is shortened in the middle, and its length is
// added.
[[nodiscard]] std::string printable(std::string_view text, std::size_t length_max = 200);

// Returns JSON that is safe for a terminal. Control and invisible characters, which can only occur
// in strings, become JSON escapes, so a program reads the same document. ASCII is unchanged.
[[nodiscard]] std::string visible_json(std::string_view text);

// Returns a text such as "'a', 'b' and 3 more". `count` is the total number of names; `names` may
// contain only the first few.
[[nodiscard]] std::string name_list(std::span<const std::string> names, std::uint64_t count,
                                    std::size_t shown_max = 8);
[[nodiscard]] inline std::string name_list(std::span<const std::string> names) {
  return name_list(names, names.size());
}
// Returns "a, b or c".
[[nodiscard]] std::string either(std::span<const std::string> words);
// Returns "1 tensor" or "2 tensors".
[[nodiscard]] std::string counted(std::uint64_t count, std::string_view thing);

[[nodiscard]] inline std::string_view as_text(std::span<const std::byte> bytes) noexcept {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Returns a text such as "12 s", "1:05 min" or "2:30 h".
[[nodiscard]] std::string time_text(double seconds);

// Returns a size such as "91.0 MB", in decimal units as file managers and disks use.
[[nodiscard]] std::string human_bytes(std::uint64_t bytes);

[[nodiscard]] constexpr bool is_digit(char character) noexcept {
  return character >= '0' && character <= '9';
}
// Returns true if the text is one or more digits.
[[nodiscard]] constexpr bool is_digits(std::string_view text) noexcept {
  return !text.empty() && std::ranges::all_of(text, is_digit);
}

// Returns an exact size such as "64MiB", "5GB" or "4097B", which parse_bytes() can read.
[[nodiscard]] std::string exact_bytes(std::uint64_t bytes);

// Parses a size such as "8GiB", "500MB", "1.5 GB" or "4096". Returns false if the text is not a
// size.
[[nodiscard]] bool parse_bytes(std::string_view text, std::uint64_t& bytes);

struct Character {
  std::uint32_t code;
  std::size_t bytes;
};
// Returns the first character of a text that is not empty. Its length is 0 if it is not well-formed
// UTF-8.
[[nodiscard]] Character first_character(std::string_view text) noexcept;

// Returns true for well-formed UTF-8.
[[nodiscard]] bool is_utf8(std::string_view text) noexcept;

}  // namespace loadstone
