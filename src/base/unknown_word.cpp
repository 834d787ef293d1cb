#include "base/unknown_word.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/text.h"

namespace loadstone {

namespace {

constexpr std::size_t compared_bytes_max = 200;
constexpr std::size_t shown_max = 3;

bool is_end_of(std::string_view typed, std::string_view word) {
  return word.size() > typed.size() && word.ends_with(typed) &&
         word[word.size() - typed.size() - 1] == '.';
}

// Returns the words with the smallest edit distance.
std::vector<std::string> nearest(std::string_view typed, const std::vector<std::string>& known) {
  auto least = static_cast<unsigned>(std::min<std::size_t>(typed.size() / 3 + 1, 8));
  std::vector<std::string> near;
  for (const std::string& word : known) {
    const auto distance =
        is_end_of(typed, word) ? std::optional(1u) : edit_distance(typed, word, least);
    if (!distance || *distance > least || word.empty()) continue;
    if (*distance < least) near.clear();
    least = *distance;
    near.push_back(word);
  }
  if (near.size() > shown_max) near.resize(shown_max);
  return near;
}

}  // namespace

std::optional<unsigned> edit_distance(std::string_view a, std::string_view b,
                                      unsigned distance_max) {
  if (a.size() > b.size()) std::swap(a, b);
  if (b.size() - a.size() > distance_max || b.size() > compared_bytes_max) return std::nullopt;
  while (!a.empty() && a.back() == b.back()) {
    a.remove_suffix(1);
    b.remove_suffix(1);
  }
  while (!a.empty() && a.front() == b.front()) {
    a.remove_prefix(1);
    b.remove_prefix(1);
  }
  std::array<unsigned, compared_bytes_max + 1> row;
  for (unsigned j = 0; j <= a.size(); ++j) row[j] = j;
  for (unsigned i = 1; i <= b.size(); ++i) {
    unsigned diagonal = row[0];
    unsigned least = row[0] = i;
    for (std::size_t j = 1; j <= a.size(); ++j) {
      const unsigned change = diagonal + (a[j - 1] == b[i - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
      least = std::min(least, row[j]);
    }
    if (least > distance_max) return std::nullopt;
  }
  return row[a.size()] <= distance_max ? std::optional(row[a.size()]) : std::nullopt;
}

std::string did_you_mean(std::string_view typed, const std::vector<std::string>& known) {
  std::vector<std::string> near = nearest(typed, known);
  for (std::string& word : near) word = fmt::format("'{}'", printable(word));
  return near.empty() ? "" : fmt::format("; did you mean {}?", either(near));
}

std::string unknown_word(std::string_view what, std::string_view typed,
                         const std::vector<std::string>& known) {
  std::string near = did_you_mean(typed, known);
  if (near.empty()) near = "; expected " + either(known);
  return fmt::format("unknown {} '{}'{}", what, printable(typed), near);
}

}  // namespace loadstone
