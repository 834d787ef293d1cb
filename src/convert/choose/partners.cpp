#include "convert/choose/partners.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "codec/encode.h"
#include "convert/experts.h"

namespace loadstone {

namespace {

// The weights of one group by encoding. Unquantized weights have no_encoding.
using Partners = std::map<std::string, std::vector<std::string>>;

unsigned bits_of(const std::string& encoding) {
  constexpr unsigned unquantized = 16;
  const WrittenEncoding* const written = find_written_encoding(encoding);
  return written == nullptr ? unquantized : written->bits;
}

// Returns the encoding of the group that loses the least.
const std::string& widest(const Partners& partners) {
  return std::ranges::max_element(partners, {},
                                  [](const auto& each) { return bits_of(each.first); })
      ->first;
}

// Returns a name such as "model.layers.0.self_attn.{k,q,v}_proj.weight": the parts in which the
// names of a group differ are in braces.
std::string joined_name(const Partners& partners) {
  std::set<std::string> names;
  for (const auto& [encoding, members] : partners) names.insert(members.begin(), members.end());
  const std::string& first = *names.begin();
  std::size_t begin = first.size();
  std::size_t end = first.size();
  for (const std::string& name : names) {
    begin = std::min(
        begin, static_cast<std::size_t>(std::ranges::mismatch(first, name).in1 - first.begin()));
    const auto tail = std::mismatch(first.rbegin(), first.rend(), name.rbegin(), name.rend());
    end = std::min(end, static_cast<std::size_t>(tail.first - first.rbegin()));
  }
  std::vector<std::string> parts;
  for (const std::string& name : names) {
    const std::size_t own = std::min(end, name.size() - begin);
    parts.push_back(name.substr(begin, name.size() - begin - own));
  }
  return fmt::format("{}{{{}}}{}", first.substr(0, begin), fmt::join(parts, ","),
                     first.substr(first.size() - std::min(end, first.size() - begin)));
}

}  // namespace

void report_mixed_partners(const Recipes& recipes, const Chooser& chooser, const Choices& choices,
                           std::vector<Finding>& findings) {
  std::map<std::string, Partners> groups;
  for (const TargetRecipe& recipe : recipes.targets) {
    const std::string group = chooser.group_of(recipe.target);
    if (group.empty() || expert_name(recipe.target)) continue;
    const auto found = choices.quantize.find(recipe.target);
    const bool is_plain = found == choices.quantize.end();
    groups[group][is_plain ? std::string(no_encoding) : found->second.encoding].push_back(
        recipe.target);
  }
  std::vector<std::string> names;
  std::set<std::string> encodings;
  std::set<std::string> advice;
  for (const auto& [group, partners] : groups) {
    if (partners.size() < 2) continue;
    names.push_back(joined_name(partners));
    for (const auto& [encoding, members] : partners) encodings.insert(encoding);
    advice.insert(fmt::format("--quantize '{}={}'", chooser.pattern_of(group), widest(partners)));
  }
  if (names.empty()) return;
  std::string message = fmt::format(
      "{} of layers would have several encodings ({}), but vLLM and other servers join each group "
      "to one layer, which needs one encoding: {}",
      counted(names.size(), "group"), fmt::join(encodings, ", "), name_list(names));
  findings.push_back(
      {.severity = Severity::warning,
       .code = "convert.unread",
       .sources = std::move(names),
       .message = std::move(message),
       .suggestion = fmt::format(
           "give each group one encoding, before the other patterns: {} (quantize= in Python)",
           fmt::join(advice, " "))});
}

}  // namespace loadstone
