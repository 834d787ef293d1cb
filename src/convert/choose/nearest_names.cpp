#include "convert/choose/nearest_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "base/text.h"
#include "base/unknown_word.h"
#include "convert/choose/choose.h"

namespace loadstone {

namespace {

constexpr std::size_t names_shown = 3;

// Returns the pattern without the characters that have a meaning in regular expressions.
std::string literal_of(std::string_view pattern) {
  std::string text;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const bool is_class = pattern[i] == '\\' && i + 1 < pattern.size() && pattern[i + 1] != '.';
    if (is_class) ++i;
    if (is_class || std::string_view("\\^$()[]{}?*+|").find(pattern[i]) != std::string_view::npos) {
      continue;
    }
    text += pattern[i];
  }
  const auto is_dot = [](char each) { return each == '.'; };
  while (!text.empty() && is_dot(text.back())) text.pop_back();
  return text.substr(std::min(text.find_first_not_of('.'), text.size()));
}

// Returns the smallest distance between the text and as many successive components of the name.
unsigned distance_to(const std::string& name, std::string_view text, unsigned most) {
  const auto dots = std::ranges::count(text, '.');
  unsigned nearest = most + 1;
  for (std::size_t begin = 0; begin < name.size(); ++begin) {
    if (begin > 0 && name[begin - 1] != '.') continue;
    std::size_t end = begin;
    for (auto i = 0; i <= dots && end != name.npos; ++i) {
      end = name.find('.', i == 0 ? begin : end + 1);
    }
    const std::string_view part = std::string_view(name).substr(begin, end - begin);
    if (const auto distance = edit_distance(part, text, most))
      nearest = std::min(nearest, *distance);
    if (end == name.npos) break;
  }
  return nearest;
}

}  // namespace

std::string nearest_names(std::string_view pattern, const std::vector<std::string>& names) {
  const std::string text = folded_name(literal_of(pattern));
  const auto most = static_cast<unsigned>(text.size() / 3 + 1);
  std::set<std::string> folded;
  for (const std::string& name : names) folded.insert(folded_name(name));
  std::vector<std::string> nearest;
  unsigned least = most;
  for (const std::string& name : folded) {
    const unsigned distance = text.empty() ? most + 1 : distance_to(name, text, most);
    if (distance > least) continue;
    if (distance < least) nearest.clear();
    least = distance;
    nearest.push_back(name);
  }
  const bool is_similar = !nearest.empty();
  if (!is_similar) nearest.assign(folded.begin(), folded.end());
  return fmt::format("{}: {}", is_similar ? "similar names" : "the names of the tensors",
                     name_list(nearest, nearest.size(), names_shown));
}

}  // namespace loadstone
