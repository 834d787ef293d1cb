#include "convert/choose/module_wildcards.h"

#include <fmt/format.h>

#include <map>
#include <optional>
#include <utility>

#include "base/pattern.h"
#include "base/text.h"
#include "convert/choose/module_selection.h"
#include "convert/choose/module_sets.h"

namespace loadstone {

namespace {

using Names = std::set<std::string>;

// Returns a wildcard that matches only this text.
std::string quoted_wildcard(std::string_view text) {
  std::string wildcard;
  for (const char each : text) {
    const bool is_special = each == '*' || each == '?' || each == '[';
    wildcard += is_special ? fmt::format("[{}]", each) : std::string(1, each);
  }
  return wildcard;
}

// Returns true if a pattern in `sums` that ends with * matches the name.
bool is_covered(const Names& sums, std::string_view name) {
  if (name.ends_with('*')) return false;
  for (std::size_t size = name.size(); size > 0; --size) {
    if (sums.contains(std::string(name.substr(0, size)) + '*')) return true;
  }
  return false;
}

// Returns the wildcard with * for each number, or number and *, after the first `kept` ones;
// nullopt if there is no such number.
std::optional<std::string> with_stars(std::string_view wildcard, std::size_t kept) {
  std::string text;
  bool has_star = false;
  for_each_component(wildcard, [&](std::string_view component) {
    const bool is_number = is_digits(component.substr(0, component.find('*')));
    const bool is_star = is_number && kept == 0;
    if (is_number && kept > 0) --kept;
    has_star |= is_star;
    text.append(is_star ? "*" : component) += '.';
  });
  text.pop_back();
  return has_star ? std::optional(std::move(text)) : std::nullopt;
}

Pattern compiled_wildcard(std::string_view wildcard) {
  std::string text = "(?s)^";
  for (std::size_t i = 0; i < wildcard.size(); ++i) {
    if (wildcard[i] == '*') {
      text += ".*";
      continue;
    }
    const bool is_quoted = wildcard[i] == '[';
    text += re2::RE2::QuoteMeta(piece(wildcard.substr(is_quoted ? i + 1 : i, 1)));
    if (is_quoted) i += 2;
  }
  return compile_pattern(text + "$", "plan.options", "rules", pattern_memory(1));
}

bool wildcard_matches(const std::string& wildcard, const Names& names) {
  const Pattern pattern = compiled_wildcard(wildcard);
  const std::string prefix = wildcard.substr(0, wildcard.find_first_of("*["));
  for (auto each = names.lower_bound(prefix); each != names.end() && each->starts_with(prefix);
       ++each) {
    if (is_in(*pattern, *each)) return true;
  }
  return false;
}

// Joins wildcards that differ only in numbers, if the result matches no quantized module.
Names joined_wildcards(const Names& wildcards, const Names& quantized) {
  Names forms;  // a wildcard without numbers matches all numbers alike
  for (const std::string& name : quantized) forms.insert(with_zeros(name));
  std::map<std::string, bool> is_free;
  Names joined;
  for (const std::string& wildcard : wildcards) {
    std::string best = wildcard;
    for (const std::size_t kept : {1, 0}) {
      const auto starred = with_stars(wildcard, kept);
      if (!starred) continue;
      const auto [known, is_new] = is_free.try_emplace(*starred);
      if (is_new) known->second = !wildcard_matches(*starred, kept == 0 ? forms : quantized);
      if (known->second) best = *starred;
    }
    joined.insert(std::move(best));
  }
  return joined;
}

}  // namespace

bool has_prefix(const Names& names, std::string_view prefix) {
  const auto found = names.lower_bound(std::string(prefix));
  return found != names.end() && found->starts_with(prefix);
}

std::vector<std::string> summed_up(const QuantizedModules& modules) {
  Names taken;
  for (const auto& [name, quantization] : modules.quantized) taken.insert(name);
  Names sums;
  for (const std::string& name : modules.plain) {
    // Find the shortest prefix, up to a dot, that no quantized module has.
    std::string sum = quoted_wildcard(name);
    for (std::size_t dot = name.find('.'); dot != std::string::npos;
         dot = name.find('.', dot + 1)) {
      const std::string prefix = name.substr(0, dot);
      if (!has_prefix(taken, prefix)) {
        sum = quoted_wildcard(prefix) + "*";
        break;
      }
      if (!taken.contains(prefix) && !has_prefix(taken, prefix + ".")) {
        sum = quoted_wildcard(prefix) + ".*";
        break;
      }
    }
    sums.insert(std::move(sum));
  }
  std::erase_if(sums, [&](const std::string& sum) { return is_covered(sums, sum); });
  if (sums.size() > listed_names_max) sums = joined_wildcards(sums, taken);
  return {sums.begin(), sums.end()};
}

}  // namespace loadstone
