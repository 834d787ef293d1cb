#include "convert/experts.h"

#include <fmt/format.h>
#include <re2/re2.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "boxes/cut.h"
#include "boxes/dims.h"
#include "convert/quantize_rules.h"

namespace loadstone {

namespace {

re2::StringPiece piece(std::string_view text) { return {text.data(), text.size()}; }

// The elements [begin, end) of the stack, as a matrix.
TargetRecipe rows_of(const TargetRecipe& stack, std::string name, std::uint64_t begin,
                     std::uint64_t rows) {
  const std::uint64_t columns = stack.shape[2];
  TargetRecipe recipe = {.target = std::move(name), .shape = {rows, columns}, .dtype = stack.dtype};
  for (Box box : stack.boxes) {
    if (is_empty(box) || !order_to_cut(box)) continue;
    cut_box(box, begin, begin + rows * columns, recipe.boxes);
  }
  return recipe;
}

Finding too_many(const TargetRecipe& stack, std::uint64_t tensors_max) {
  return {.severity = Severity::error,
          .code = "plan.shape",
          .target = stack.target,
          .sources = {stack.target},
          .message = fmt::format("'{}' {} would be cut into more experts than a file of this size "
                                 "can hold: {} tensors at most",
                                 printable(stack.target), stack.shape.text(), tensors_max),
          .suggestion = "--exclude it",
          .found = stack.shape.text()};
}

}  // namespace

void split_stacks(Recipes& recipes, std::string_view model_type,
                  const std::function<bool(const TargetRecipe&)>& wanted, std::uint64_t tensors_max,
                  std::vector<Finding>& findings) {
  if (re2::RE2::FullMatch(piece(model_type), re2::RE2(piece(turned_stack_types())))) return;
  std::vector<TargetRecipe> targets;
  std::uint64_t made = 0;
  const auto rule_of = [&](const TargetRecipe& recipe, std::string& module) -> const StackRule* {
    const bool is_stack = recipe.shape.rank() == 3 && recipe.shape.numel().value_or(0) > 0;
    if (!is_stack || recipe.constant != nullptr || !wanted(recipe)) return nullptr;
    for (const StackRule& rule : stack_rules()) {
      const bool fits = re2::RE2::FullMatch(recipe.target, re2::RE2(piece(rule.pattern)), &module);
      if (fits && (rule.second.empty() || recipe.shape[1] % 2 == 0)) return &rule;
    }
    return nullptr;
  };
  targets.reserve(recipes.targets.size());
  for (TargetRecipe& recipe : recipes.targets) {
    std::string module;
    const StackRule* const rule = rule_of(recipe, module);
    if (rule == nullptr) {
      targets.push_back(std::move(recipe));
      continue;
    }
    const std::uint64_t parts = rule->second.empty() ? 1 : 2;
    if (recipe.shape[0] > (tensors_max - made) / parts) {
      findings.push_back(too_many(recipe, tensors_max));
      targets.push_back(std::move(recipe));
      continue;
    }
    made += recipe.shape[0] * parts;
    const std::uint64_t rows = recipe.shape[1] / parts;
    std::uint64_t begin = 0;
    for (std::uint64_t expert = 0; expert < recipe.shape[0]; ++expert) {
      for (const std::string_view projection : {rule->first, rule->second}) {
        if (projection.empty()) continue;
        targets.push_back(rows_of(
            recipe, fmt::format("{}.{}.{}.weight", module, expert, projection), begin, rows));
        begin += rows * recipe.shape[2];
      }
    }
  }
  recipes.targets = std::move(targets);
}

}  // namespace loadstone
