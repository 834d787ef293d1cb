#include "base/finding_json.h"

#include <fmt/format.h>

#include <cstddef>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/text.h"

namespace loadstone {

namespace {

bool is_alphanumeric(char byte) {
  return is_digit(byte) || (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
}

// Returns the text without the names in quotes. An apostrophe inside a word is not a quote.
std::string without_names(std::string_view text) {
  std::string rest;
  bool is_name = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool follows_word = i > 0 && is_alphanumeric(text[i - 1]);
    const bool precedes_word = i + 1 < text.size() && is_alphanumeric(text[i + 1]);
    if (text[i] == '\'' && !(is_name ? precedes_word : follows_word)) {
      is_name = !is_name;
    } else if (!is_name) {
      rest += text[i];
    }
  }
  return rest;
}

}  // namespace

std::string finding_lines(const std::vector<Finding>& findings) {
  using Key = std::tuple<Severity, std::string_view, std::string>;
  std::map<Key, std::size_t> counts;
  const auto key_of = [](const Finding& each) {
    return Key(each.severity, each.code, without_names(each.message));
  };
  for (const Finding& each : findings) ++counts[key_of(each)];
  std::string text;
  for (const Finding& each : findings) {
    const std::size_t count = std::exchange(counts[key_of(each)], 0);
    if (count == 0) continue;  // belongs to an earlier line
    text +=
        fmt::format("  {}: {} [{}]{}\n", name(each.severity), printable(each.message, 2000),
                    each.code, count == 1 ? "" : fmt::format(" and {} more like it", count - 1));
  }
  return text;
}

}  // namespace loadstone
