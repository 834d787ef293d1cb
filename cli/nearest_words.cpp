#include "cli/nearest_words.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "plan/nearest.h"

namespace loadstone::cli {

namespace {

constexpr std::size_t shown_max = 3;

}  // namespace

std::string nearest_words(const std::string& typed, const std::vector<std::string_view>& known) {
  const auto edits_max = static_cast<unsigned>(std::min<std::size_t>(typed.size() / 3 + 1, 8));
  std::vector<std::pair<unsigned, std::string_view>> near;
  for (const std::string_view word : known) {
    const bool is_part = word.ends_with("." + typed);
    const auto distance = is_part ? std::optional(1u) : edit_distance(typed, word, edits_max);
    if (distance) near.emplace_back(*distance, word);
  }
  std::ranges::sort(near);
  if (near.size() > shown_max) near.resize(shown_max);
  std::string text;
  for (const auto& [distance, word] : near)
    text += (text.empty() ? "; nearest: " : ", ") + std::string(word);
  return text;
}

}  // namespace loadstone::cli
