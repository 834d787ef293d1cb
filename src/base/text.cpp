#include "base/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>

namespace loadstone {

namespace {

struct ByteUnit {
  std::string_view name;
  std::uint64_t bytes;
};

constexpr auto byte_units = std::to_array<ByteUnit>({{"B", 1},
                                                     {"kB", 1000},
                                                     {"MB", 1'000'000},
                                                     {"GB", 1'000'000'000},
                                                     {"TB", 1'000'000'000'000},
                                                     {"KiB", 1u << 10},
                                                     {"MiB", 1u << 20},
                                                     {"GiB", 1u << 30},
                                                     {"TiB", std::uint64_t{1} << 40}});

char lower(char character) {
  return static_cast<char>(std::tolower(static_cast<unsigned char>(character)));
}

// Bytes at the front that a terminal takes for an order or that make a line read as another one:
// control characters (C0, DEL, C1), line separators, changes of the direction of writing.
std::size_t unsafe_bytes(std::string_view text) noexcept {
  const auto byte = [&](std::size_t i) {
    return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
  };
  const auto is_between = [](unsigned value, unsigned least, unsigned most) {
    return value >= least && value <= most;
  };
  if (byte(0) < 0x20 || byte(0) == 0x7f) return 1;
  if (byte(0) == 0xc2 && is_between(byte(1), 0x80, 0x9f)) return 2;
  if (byte(0) != 0xe2) return 0;
  const bool separates_or_turns = byte(1) == 0x80 && is_between(byte(2), 0xa8, 0xae);
  const bool isolates = byte(1) == 0x81 && is_between(byte(2), 0xa6, 0xa9);
  return separates_or_turns || isolates ? 3 : 0;
}

std::string escaped(std::string_view text) {
  const bool valid = is_utf8(text);
  std::string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    std::size_t unsafe = unsafe_bytes(text.substr(at));
    if (!valid && static_cast<unsigned char>(text[at]) >= 0x80) unsafe = 1;
    if (unsafe == 0) out += text[at++];
    for (; unsafe > 0; --unsafe) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[at++]));
    }
  }
  return out;
}

// The place at or before `at` where no character is cut.
std::size_t before_character(std::string_view text, std::size_t at) noexcept {
  std::size_t place = at;
  while (place > 0 && at - place < 3 &&
         (static_cast<unsigned char>(text[place]) & 0xc0u) == 0x80u) {
    --place;
  }
  return place;
}

}  // namespace

std::string printable(std::string_view text, std::size_t length_max) {
  if (text.size() <= length_max) return escaped(text);
  const std::size_t part = length_max / 2;
  return fmt::format("{}...({} bytes)...{}", escaped(text.substr(0, before_character(text, part))),
                     text.size(), escaped(text.substr(before_character(text, text.size() - part))));
}

std::string name_list(std::span<const std::string> names, std::uint64_t count,
                      std::size_t shown_max) {
  std::string text;
  const std::size_t shown = std::min(names.size(), shown_max);
  for (std::size_t i = 0; i < shown; ++i) {
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", printable(names[i]));
  }
  if (count > shown) text += fmt::format(" and {} more", count - shown);
  return text;
}

std::string either(std::span<const std::string> words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += words[i];
  }
  return text;
}

std::string counted(std::uint64_t count, std::string_view thing) {
  return fmt::format("{} {}{}", count, thing, count == 1 ? "" : "s");
}

std::string human_bytes(std::uint64_t bytes) {
  static constexpr std::array<std::string_view, 6> units = {"kB", "MB", "GB", "TB", "PB", "EB"};
  if (bytes < 1000) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  value /= 1000;
  while (value >= 999.95 && unit + 1 < units.size()) {
    value /= 1000;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, units[unit]);
}

std::string exact_bytes(std::uint64_t bytes) {
  ByteUnit best = byte_units.front();
  for (const ByteUnit& unit : byte_units) {
    if (bytes % unit.bytes == 0 && unit.bytes > best.bytes) best = unit;
  }
  return fmt::format("{}{}", bytes / best.bytes, best.name);
}

bool parse_bytes(std::string_view text, std::uint64_t& bytes) {
  double number = 0;
  const auto [end, problem] =
      std::from_chars(text.data(), text.data() + text.size(), number, std::chars_format::fixed);
  if (problem != std::errc{} || !(number >= 0)) return false;  // no negative size, and no NaN
  std::string unit;
  for (const char* at = end; at != text.data() + text.size(); ++at) {
    if (*at != ' ') unit += lower(*at);
  }
  if (unit.empty()) unit = "b";
  for (const ByteUnit& known : byte_units) {
    if (!std::ranges::equal(known.name, unit, {}, lower)) continue;
    const double product = number * static_cast<double>(known.bytes);
    if (product >= 18446744073709551616.0) return false;
    bytes = static_cast<std::uint64_t>(product);
    return true;
  }
  return false;
}

bool is_utf8(std::string_view text) noexcept {
  std::size_t at = 0;
  const auto byte_at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  while (at < text.size()) {
    const unsigned lead = byte_at(at);
    if (lead < 0x80) {
      ++at;
      continue;
    }
    const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || at + length > text.size()) return false;
    std::uint32_t code = lead & (0x7fu >> length);
    for (std::size_t i = 1; i < length; ++i) {
      if ((byte_at(at + i) & 0xc0u) != 0x80u) return false;
      code = (code << 6) | (byte_at(at + i) & 0x3fu);
    }
    const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
    if (overlong || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return false;
    at += length;
  }
  return true;
}

}  // namespace loadstone
