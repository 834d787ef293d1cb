#include "convert/experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/pattern.h"
#include "base/text.h"
#include "boxes/cut.h"
#include "boxes/dims.h"
#include "convert/quantize_rules.h"
#include "loadstone/merge.h"

namespace loadstone {

namespace {

std::vector<Box> cut(const std::vector<Box>& boxes, std::uint64_t begin, std::uint64_t end) {
  std::vector<Box> found;
  for (Box box : boxes) {
    if (is_empty(box) || !order_to_cut(box)) continue;
    cut_box(box, begin, end, found);
  }
  return found;
}

// The rows of a product that lie in the rows [begin, begin + rows) of its target; nothing where
// none does.
std::optional<LowRank> rows_of(const LowRank& product, std::uint64_t begin, std::uint64_t rows) {
  const std::uint64_t first = std::max(product.row_begin, begin);
  const std::uint64_t last = std::min(product.row_begin + product.rows, begin + rows);
  if (first >= last) return std::nullopt;
  LowRank part = product;
  part.row_begin = first - begin;
  part.rows = last - first;
  const std::uint64_t skipped = first - product.row_begin;
  part.left = cut(product.left, skipped * product.rank, (skipped + part.rows) * product.rank);
  if (!product.magnitudes.empty()) {
    part.magnitudes = cut(product.magnitudes, skipped, skipped + part.rows);
  }
  return part;
}

// Null: nothing is left of it but the boxes.
std::shared_ptr<const Merge> rows_of(const Merge& merge, std::uint64_t columns, std::uint64_t begin,
                                     std::uint64_t rows) {
  Merge part = merge;
  part.terms.clear();
  for (const Term& term : merge.terms) {
    if (!term.low_rank) {
      part.terms.push_back(term);
      part.terms.back().boxes = cut(term.boxes, begin * columns, (begin + rows) * columns);
    } else if (auto product = rows_of(*term.low_rank, begin, rows)) {
      part.terms.push_back({.factor = term.factor, .boxes = {}, .low_rank = std::move(product)});
    }
  }
  if (part.terms.empty() && part.factor == 1 && part.form == MergeForm::sum) return nullptr;
  return std::make_shared<const Merge>(std::move(part));
}

// The elements [begin, end) of the stack, as a matrix.
TargetRecipe rows_of(const TargetRecipe& stack, std::string name, std::uint64_t begin,
                     std::uint64_t rows) {
  const std::uint64_t columns = stack.shape[2];
  TargetRecipe recipe = {.target = std::move(name), .shape = {rows, columns}, .dtype = stack.dtype};
  recipe.boxes = cut(stack.boxes, begin, begin + rows * columns);
  if (stack.merge != nullptr) recipe.merge = rows_of(*stack.merge, columns, begin / columns, rows);
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

Finding lies_otherwise(const TargetRecipe& stack) {
  return {.severity = Severity::error,
          .code = "plan.shape",
          .target = stack.target,
          .sources = {stack.target},
          .message = fmt::format("'{}' {} lies [experts, hidden, 2 * inner], and its experts are "
                                 "quantized as [2 * inner, hidden]",
                                 printable(stack.target), stack.shape.text()),
          .suggestion = "convert with --experts separate, and quantize the result",
          .found = stack.shape.text()};
}

// Shapes of the stacks [experts, hidden, inner] by their module. Beside "gate_up_proj" they tell
// which way both lie.
std::map<std::string, Shape> down_shapes(const Recipes& recipes) {
  static const re2::RE2 pattern(R"(^(.*\.experts)\.down_proj(?:\.weight)?$)");
  std::map<std::string, Shape> shapes;
  std::string module;
  for (const TargetRecipe& recipe : recipes.targets) {
    if (recipe.shape.rank() == 3 && re2::RE2::FullMatch(recipe.target, pattern, &module)) {
      shapes.emplace(module, recipe.shape);
    }
  }
  return shapes;
}

// The rule whose stack the recipe is, and its module. Null: it is none that can be cut.
const StackRule* rule_of(const TargetRecipe& recipe, std::string& module) {
  if (recipe.shape.rank() != 3 || recipe.shape.numel().value_or(0) == 0) return nullptr;
  if (recipe.constant != nullptr) return nullptr;
  const std::uint64_t width = recipe.merge == nullptr ? 0 : recipe.merge->row_elements;
  if (width != 0 && width != recipe.shape[2]) return nullptr;
  for (const StackRule& rule : stack_rules()) {
    const bool fits = re2::RE2::FullMatch(recipe.target, re2::RE2(piece(rule.pattern)), &module);
    if (fits && (!rule.second || recipe.shape[1] % 2 == 0)) return &rule;
  }
  return nullptr;
}

// The weights of a stack's experts.
void cut_stack(const TargetRecipe& stack, const StackRule& rule, const std::string& prefix,
               ExpertWords words, std::vector<TargetRecipe>& targets) {
  const std::uint64_t rows = stack.shape[1] / (rule.second ? 2 : 1);
  std::uint64_t begin = 0;
  for (std::uint64_t expert = 0; expert < stack.shape[0]; ++expert) {
    for (const auto role : {std::optional(rule.first), rule.second}) {
      if (!role) continue;
      targets.push_back(rows_of(
          stack, fmt::format("{}.{}.{}.weight", prefix, expert, name(*role, words)), begin, rows));
      begin += rows * stack.shape[2];
    }
  }
}

}  // namespace

std::size_t split_stacks(Recipes& recipes, std::string_view model_type,
                         const std::function<bool(const TargetRecipe&)>& wanted,
                         std::uint64_t tensors_max, std::vector<Finding>& findings) {
  if (re2::RE2::FullMatch(piece(model_type), re2::RE2(piece(turned_stack_types())))) return 0;
  const ExpertNaming naming = expert_naming(model_type);
  const std::map<std::string, Shape> downs = down_shapes(recipes);
  std::vector<TargetRecipe> targets;
  std::set<std::string, std::less<>> blocks;  // of stacks that were cut
  std::uint64_t made = 0;
  std::size_t stacks = 0;
  targets.reserve(recipes.targets.size());
  for (TargetRecipe& recipe : recipes.targets) {
    std::string module;
    const StackRule* const rule = rule_of(recipe, module);
    if (rule == nullptr || !wanted(recipe)) {
      targets.push_back(std::move(recipe));
      continue;
    }
    const std::uint64_t parts = rule->second ? 2 : 1;
    const auto down = downs.find(module);
    if (parts == 2 && down != downs.end() && recipe.shape[2] == 2 * down->second[1]) {
      findings.push_back(lies_otherwise(recipe));
    }
    if (recipe.shape[0] > (tensors_max - made) / parts) {
      findings.push_back(too_many(recipe, tensors_max));
      targets.push_back(std::move(recipe));
      continue;
    }
    made += recipe.shape[0] * parts;
    ++stacks;
    blocks.emplace(block_of(module));
    cut_stack(recipe, *rule, separate_name(module, naming), naming.words, targets);
  }
  for (TargetRecipe& recipe : targets) {
    if (!is_in_block(blocks, recipe.target)) continue;
    recipe.target = separate_name(std::move(recipe.target), naming);
  }
  recipes.targets = std::move(targets);
  return stacks;
}

}  // namespace loadstone
