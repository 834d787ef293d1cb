#include "convert/choose/quantize_patterns.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "base/pattern.h"
#include "convert/choose/module_sets.h"
#include "convert/choose/quantize_rules.h"

namespace loadstone {

namespace {

// Matches names without a numeric component, which are modules outside of the blocks of layers.
constexpr std::string_view outside_blocks = R"(\d*[^.\d][^.]*(\.\d*[^.\d][^.]*)*$)";

// Matches heads of encoders, which no file contains because their weights are tied to an embedding.
constexpr const char* tied_heads = R"((.*\.)?(lm_head|predictions|cls|head)\.decoder$)";

Pattern compile_module_pattern(std::string_view text) {
  return compile_pattern(fmt::format("^(?:{})", text), "plan.options", "rules", pattern_memory(1));
}

// Modules by their names with 0 for each number: the rules match all numbers alike.
using Forms = std::map<std::string, std::vector<std::string>>;

Forms forms_of(const std::vector<std::string>& modules) {
  Forms forms;
  for (const std::string& each : modules) forms[with_zeros(each)].push_back(each);
  return forms;
}

bool matches_any(const re2::RE2& pattern, const Forms& forms) {
  return std::ranges::any_of(forms, [&](const auto& form) { return is_in(pattern, form.first); });
}

}  // namespace

Selection select_plain(const std::vector<std::string>& plain,
                       const std::vector<std::string>& quantized) {
  Forms left = forms_of(plain);
  const Forms taken = forms_of(quantized);
  std::vector<std::string> patterns;
  std::vector<std::string> single;
  const auto move_to_single = [&](Forms::iterator form) {
    single.insert(single.end(), form->second.begin(), form->second.end());
    return left.erase(form);
  };
  const auto add = [&](const std::string& text) {
    const Pattern pattern = compile_module_pattern(text);
    if (!matches_any(*pattern, left) || matches_any(*pattern, taken)) return;
    std::erase_if(left, [&](const auto& form) { return is_in(*pattern, form.first); });
    patterns.push_back(text);
  };
  const Pattern outside = compile_module_pattern(outside_blocks);
  if (matches_any(*outside, taken)) {
    // The rules below are meant for blocks: for modules outside of blocks they could match a
    // quantized module under a different name, so these modules get single patterns.
    for (auto form = left.begin(); form != left.end();) {
      form = is_in(*outside, form->first) ? move_to_single(form) : std::next(form);
    }
    if (!matches_any(*compile_module_pattern(tied_heads), taken)) patterns.emplace_back(tied_heads);
  }
  add(std::string(outside_blocks));
  for (const PlainRule& rule : plain_rules()) {
    if (rule.use != RuleUse::plain || !rule.is_linear) continue;
    add(fmt::format(".*(?:{})", rule.pattern));
  }
  while (!left.empty()) move_to_single(left.begin());
  Selection selection = select_modules(single, quantized);
  selection.patterns.insert(selection.patterns.begin(), patterns.begin(), patterns.end());
  return selection;
}

}  // namespace loadstone
