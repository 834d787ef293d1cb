#include "base/text.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <initializer_list>

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

struct CodeRange {
  std::uint32_t first;
  std::uint32_t last;
};

// Characters that control terminals, change how a line is displayed, or are invisible. Includes
// Unicode's Default_Ignorable_Code_Point.
constexpr auto unsafe_codes = std::to_array<CodeRange>({
    {0x00, 0x1f},        // C0
    {0x7f, 0x9f},        // DEL, C1
    {0xad, 0xad},        // soft hyphen
    {0x034f, 0x034f},    // grapheme joiner
    {0x061c, 0x061c},    // Arabic letter mark
    {0x115f, 0x1160},    // Hangul fillers
    {0x17b4, 0x17b5},    // inherent vowels of Khmer
    {0x180b, 0x180f},    // variation selectors and vowel separator of Mongolian
    {0x200b, 0x200f},    // zero width, direction marks
    {0x2028, 0x202e},    // line separators, changes of direction
    {0x2060, 0x206f},    // joiners, isolates, deprecated controls
    {0x3164, 0x3164},    // Hangul filler
    {0xfe00, 0xfe0f},    // variation selectors
    {0xfeff, 0xfeff},    // byte order mark
    {0xffa0, 0xffa0},    // halfwidth Hangul filler
    {0xfff0, 0xfffb},    // unassigned, interlinear annotation
    {0x1bca0, 0x1bca3},  // format controls of shorthand
    {0x1d173, 0x1d17a},  // format controls of music
    {0xe0000, 0xe0fff},  // tags, more variation selectors
});

bool is_unsafe(std::uint32_t code) noexcept {
  return std::ranges::any_of(unsafe_codes, [&](const CodeRange& range) {
    return range.first <= code && code <= range.last;
  });
}

std::string escaped(std::string_view text) {
  const bool valid = is_utf8(text);
  std::string out;
  out.reserve(text.size());
  while (true) {
    const auto* const run = std::ranges::find_if(text, [](char c) { return c < ' ' || c > '~'; });
    // Copied as a whole for speed: names are ASCII, and there may be a million.
    out.append(text.begin(), run);
    text.remove_prefix(static_cast<std::size_t>(run - text.begin()));
    if (text.empty()) return out;
    const bool is_stray = !valid && static_cast<unsigned char>(text[0]) >= 0x80;
    const Character found = first_character(text);
    const std::string_view bytes = text.substr(0, is_stray ? 1 : found.bytes);
    if (is_stray || is_unsafe(found.code)) {
      for (const char each : bytes) {
        out += fmt::format("\\x{:02x}", static_cast<unsigned char>(each));
      }
    } else {
      out += bytes;
    }
    text.remove_prefix(bytes.size());
  }
}

bool is_scheme_character(char character) noexcept {
  return std::isalnum(static_cast<unsigned char>(character)) != 0 ||
         std::string_view("+-.").find(character) != std::string_view::npos;
}

bool is_one_of(std::string_view word, std::initializer_list<std::string_view> words) {
  return std::ranges::any_of(
      words, [&](std::string_view each) { return std::ranges::equal(word, each, {}, lower); });
}

// Returns true for mistyped URLs too, such as "http:/host", because they may contain a secret.
bool begins_url(std::string_view scheme, std::string_view rest) {
  const bool is_web = is_one_of(scheme, {"http", "https"}) && !rest.empty() && rest[0] != ' ';
  return scheme.size() > 1 && (rest.starts_with('/') || is_web);
}

void erase_user(std::string& url, std::size_t host) {
  const std::size_t at = url.substr(0, url.find('/', host)).rfind('@');
  if (at != std::string::npos && at >= host) url.erase(host, at + 1 - host);
}

// "#" is kept for s3 and hf, because names in a bucket may contain it.
std::string public_url_of(std::string_view url, std::string_view scheme) {
  std::string text(url.substr(0, url.find_first_of(is_one_of(scheme, {"s3", "hf"}) ? "?" : "?#")));
  erase_user(text, std::min(text.find_first_not_of('/', scheme.size() + 1), text.size()));
  return text;
}

// Returns the largest offset up to `at` that does not split a character.
std::size_t before_character(std::string_view text, std::size_t at) noexcept {
  std::size_t place = at;
  while (place > 0 && at - place < 3 &&
         (static_cast<unsigned char>(text[place]) & 0xc0u) == 0x80u) {
    --place;
  }
  return place;
}

}  // namespace

std::string without_user(std::string_view url) {
  std::string text(url);
  const std::size_t slashes = url.find("//");
  if (slashes != url.npos) erase_user(text, slashes + 2);
  return text;
}

std::string public_location(std::string_view location) {
  return without_user(location.substr(0, location.find_first_of("?#")));
}

std::string without_secrets(std::string_view text) {
  std::string kept;
  std::size_t passed = 0;
  while (true) {
    const std::size_t colon = text.find(':', passed);
    if (colon == text.npos) break;
    std::size_t begin = colon;
    while (begin > 0 && is_scheme_character(text[begin - 1])) --begin;
    while (begin < colon && std::isalpha(static_cast<unsigned char>(text[begin])) == 0) ++begin;
    const std::string_view scheme = text.substr(begin, colon - begin);
    passed = colon + 1;
    if (!begins_url(scheme, text.substr(passed))) continue;
    // A quoted URL ends at the quote, even if it contains spaces. A URL that begins the text is all
    // of the text. Any other URL ends at a space.
    const char quote = begin > 0 ? text[begin - 1] : '\0';
    const bool is_quoted = quote == '\'' || quote == '"' || quote == '`';
    const bool is_whole = begin == 0 && kept.empty();
    std::size_t end = text.npos;
    if (is_quoted) end = text.find(quote, begin);
    if (!is_quoted && !is_whole) end = text.find_first_of(" \t\r\n", begin);
    end = std::min(end, text.size());
    kept += text.substr(0, begin);
    kept += public_url_of(text.substr(begin, end - begin), scheme);
    text.remove_prefix(end);
    passed = 0;
  }
  return kept += text;
}

std::string printable(std::string_view text, std::size_t length_max) {
  // Secrets are removed before the text is shortened.
  const std::string whole = without_secrets(text);
  text = whole;
  if (text.size() <= length_max) return escaped(text);
  const std::size_t part = length_max / 2;
  return fmt::format("{}...({} bytes)...{}", escaped(text.substr(0, before_character(text, part))),
                     text.size(), escaped(text.substr(before_character(text, text.size() - part))));
}

std::string visible_json(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  const auto add = [&](std::uint32_t unit) { out += fmt::format("\\u{:04x}", unit); };
  while (!text.empty()) {
    const Character found = first_character(text);
    const std::size_t bytes = std::max<std::size_t>(found.bytes, 1);
    if (bytes == 1 || !is_unsafe(found.code)) {
      out += text.substr(0, bytes);
    } else if (found.code < 0x10000) {
      add(found.code);
    } else {
      add(0xd800 + ((found.code - 0x10000) >> 10));
      add(0xdc00 + ((found.code - 0x10000) & 0x3ff));
    }
    text.remove_prefix(bytes);
  }
  return out;
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

std::string time_text(double seconds) {
  // Times are limited to 99:59 h, because longer times are useless and could overflow an integer.
  const auto whole = static_cast<unsigned>(std::min(std::ceil(seconds), 359'999.0));
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{}:{:02} min", whole / 60, whole % 60);
  return fmt::format("{}:{:02} h", whole / 3600, whole / 60 % 60);
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
  if (problem != std::errc{} || !(number >= 0)) return false;  // rejects negative sizes and NaN
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

Character first_character(std::string_view text) noexcept {
  constexpr Character none = {0xfffd, 0};
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || bytes > text.size()) return none;
  std::uint32_t code = lead & (0x7fu >> bytes);
  for (std::size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0u) != 0x80u) return none;
    code = (code << 6) | (byte(i) & 0x3fu);
  }
  const bool overlong = (bytes == 3 && code < 0x800) || (bytes == 4 && code < 0x10000);
  if (overlong || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff)) return none;
  return {code, bytes};
}

bool is_utf8(std::string_view text) noexcept {
  while (!text.empty()) {
    const std::size_t bytes = first_character(text).bytes;
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

}  // namespace loadstone
