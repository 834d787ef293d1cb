#include "convert/experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <map>
#include <system_error>
#include <utility>

#include "base/pattern.h"
#include "base/text.h"
#include "boxes/cut.h"
#include "boxes/dims.h"
#include "catalog/expert_series.h"
#include "convert/choose/quantize_rules.h"
#include "convert/output_recipes.h"
#include "loadstone/error.h"
#include "loadstone/merge.h"

namespace loadstone {

namespace {

constexpr std::string_view mixtral_block = ".block_sparse_moe.";
constexpr std::string_view usual_block = ".mlp.";
constexpr std::string_view experts_infix = ".experts.";

// Names of roles, indexed by ExpertWords and ExpertRole.
constexpr std::array<std::array<std::string_view, 3>, 2> role_names = {
    {{"gate_proj", "up_proj", "down_proj"}, {"w1", "w3", "w2"}}};

std::string with_block(std::string name, std::string_view before, std::string_view after) {
  if (const auto at = name.find(before); at != std::string::npos) {
    name.replace(at, before.size(), after);
  }
  return name;
}

// ---- Stacks

std::vector<Box> cut(const std::vector<Box>& boxes, std::uint64_t begin, std::uint64_t end) {
  std::vector<Box> found;
  for (Box box : boxes) {
    if (is_empty(box) || !order_to_cut(box)) continue;
    cut_box(box, begin, end, found);
  }
  return found;
}

// Returns the part of a low-rank product that affects the rows [begin, begin + rows) of its target;
// nullopt if it affects none.
std::optional<LowRank> rows_of(const LowRank& product, std::uint64_t begin, std::uint64_t rows) {
  const std::uint64_t first = std::max(product.row_begin, begin);
  const std::uint64_t last = std::min(product.row_begin + product.rows, begin + rows);
  if (first >= last) return std::nullopt;
  LowRank part = product;
  part.row_begin = first - begin;
  part.rows = last - first;
  const std::uint64_t skipped = first - product.row_begin;
  part.left = cut(product.left, skipped * product.rank, (skipped + part.rows) * product.rank);
  if (product.magnitude_columns != 0 && part.rows != product.rows) {
    throw Error("merge.adapter",
                "the stack of experts cannot be split here, because DoRA needs whole products",
                {.found = fmt::format("rows {} to {}", begin, begin + rows)});
  }
  if (!product.magnitudes.empty() && product.magnitude_columns == 0) {
    part.magnitudes = cut(product.magnitudes, skipped, skipped + part.rows);
  }
  return part;
}

// Returns the merge for the rows [begin, begin + rows); null if only the boxes remain.
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
  if (part.terms.empty() && part.factor == 1 && part.op == MergeOp::sum) return nullptr;
  return std::make_shared<const Merge>(std::move(part));
}

// Returns the rows [begin / columns, begin / columns + rows) of the stack as a matrix. `begin`
// counts elements.
TargetRecipe rows_of(const TargetRecipe& stack, std::string name, std::uint64_t begin,
                     std::uint64_t rows) {
  const std::uint64_t columns = stack.shape[2];
  TargetRecipe recipe = {.target = std::move(name), .shape = {rows, columns}, .dtype = stack.dtype};
  recipe.boxes = cut(stack.boxes, begin, begin + rows * columns);
  if (stack.merge != nullptr) recipe.merge = rows_of(*stack.merge, columns, begin / columns, rows);
  return recipe;
}

Finding cannot_cut(const TargetRecipe& stack, const std::string& why, const char* suggestion) {
  return {.severity = Severity::error,
          .code = "plan.shape",
          .target = stack.target,
          .sources = {stack.target},
          .message = fmt::format("'{}' {} {}", printable(stack.target), stack.shape.text(), why),
          .suggestion = suggestion,
          .found = stack.shape.text()};
}

// Returns the shapes of stacks of down projections, [experts, hidden, inner], by module. The shape
// of "gate_up_proj" alone does not reveal if a module's stacks are transposed.
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

// Returns the rule for a recipe's stack and sets `module`; null if the stack cannot be cut.
const StackRule* rule_of(const TargetRecipe& recipe, std::string& module) {
  if (recipe.shape.rank() != 3 || recipe.shape.numel().value_or(0) == 0) return nullptr;
  if (recipe.constant != nullptr) return nullptr;
  const std::uint64_t width = recipe.merge == nullptr ? 0 : recipe.merge->row_elements;
  if (width != 0 && width != recipe.shape[2]) return nullptr;
  static const std::vector<Pattern> patterns = [] {
    std::vector<Pattern> compiled;
    for (const StackRule& rule : stack_rules) {
      compiled.push_back(std::make_unique<const re2::RE2>(piece(rule.pattern)));
    }
    return compiled;
  }();
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    const StackRule& rule = stack_rules[i];
    const bool fits = re2::RE2::FullMatch(recipe.target, *patterns[i], &module);
    if (fits && (!rule.second || recipe.shape[1] % 2 == 0)) return &rule;
  }
  return nullptr;
}

// Adds recipes for the weights of a stack's experts.
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

Recipes values_in(const std::shared_ptr<const Catalog>& catalog, ExpertLayout layout,
                  std::string_view model_type) {
  ConvertOptions options;
  options.experts = layout;
  options.dequantize = true;
  options.block_dtype = Dtype::f32;
  options.folder.config = "{\"model_type\": \"" + std::string(model_type) + "\"}";
  std::vector<Finding> findings;  // findings of the conversion, which are ignored here
  Recipes recipes = output_recipes(catalog, options, true, findings).recipes;
  if (layout == ExpertLayout::keep) {
    const auto is_wanted = [](const TargetRecipe&) { return true; };
    split_stacks(recipes, model_type, is_wanted, cut_experts_max(*catalog), findings);
  }
  return recipes;
}

}  // namespace

ExpertNaming expert_naming(std::string_view model_type) {
  static const re2::RE2 kept(piece(kept_block_types));
  static const re2::RE2 mixtral(piece(mixtral_word_types));
  const bool keeps_block = re2::RE2::FullMatch(piece(model_type), kept);
  const bool is_mixtral = keeps_block || re2::RE2::FullMatch(piece(model_type), mixtral);
  return {is_mixtral ? ExpertWords::mixtral : ExpertWords::usual, !keeps_block};
}

std::string_view name(ExpertRole role, ExpertWords words) noexcept {
  return role_names[static_cast<std::size_t>(words)][static_cast<std::size_t>(role)];
}

std::optional<ExpertName> expert_name(std::string_view name) {
  constexpr std::string_view suffix = ".weight";
  const auto at = name.rfind(experts_infix);
  if (at == std::string_view::npos || !name.ends_with(suffix)) return std::nullopt;
  const std::size_t begin = at + experts_infix.size();
  if (name.size() < begin + suffix.size()) return std::nullopt;
  const std::string_view rest = name.substr(begin, name.size() - begin - suffix.size());
  ExpertName found;
  found.prefix = name.substr(0, begin - 1);
  const char* const end = rest.data() + rest.size();
  const auto [after, problem] = std::from_chars(rest.data(), end, found.expert);
  if (problem != std::errc() || after == end || *after != '.') return std::nullopt;
  const std::string_view role(after + 1, static_cast<std::size_t>(end - after - 1));
  for (const ExpertWords words : {ExpertWords::usual, ExpertWords::mixtral}) {
    for (const ExpertRole known : expert_roles) {
      if (role != loadstone::name(known, words)) continue;
      found.role = known;
      found.words = words;
      return found;
    }
  }
  return std::nullopt;
}

std::optional<std::string> usual_module(const std::string& module) {
  const auto expert = expert_name(module + ".weight");
  if (!expert || expert->words == ExpertWords::usual) return std::nullopt;
  return fmt::format("{}.{}.{}", expert->prefix, expert->expert,
                     name(expert->role, ExpertWords::usual));
}

std::string fused_name(std::string name, const ExpertNaming& naming) {
  if (!naming.renames_block) return name;
  return with_block(std::move(name), mixtral_block, usual_block);
}

std::string separate_name(std::string name, const ExpertNaming& naming) {
  if (naming.words == ExpertWords::usual || !naming.renames_block) return name;
  return with_block(std::move(name), usual_block, mixtral_block);
}

std::string_view block_of(std::string_view prefix) noexcept {
  return prefix.substr(0, prefix.rfind('.') + 1);
}

bool is_in_block(const std::set<std::string, std::less<>>& blocks, std::string_view name) {
  const auto after = blocks.upper_bound(name);
  return after != blocks.begin() && name.starts_with(*std::prev(after));
}

std::size_t split_stacks(Recipes& recipes, std::string_view model_type,
                         const std::function<bool(const TargetRecipe&)>& wanted,
                         std::uint64_t tensors_max, std::vector<Finding>& findings) {
  static const re2::RE2 turned(piece(turned_stack_types));
  if (re2::RE2::FullMatch(piece(model_type), turned)) return 0;
  const ExpertNaming naming = expert_naming(model_type);
  const std::map<std::string, Shape> downs = down_shapes(recipes);
  std::vector<TargetRecipe> targets;
  std::set<std::string, std::less<>> blocks;  // blocks that contained cut stacks
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
      findings.push_back(
          cannot_cut(recipe,
                     "has the layout [experts, hidden, 2 * inner], but its experts would be "
                     "quantized as [2 * inner, hidden]",
                     "first convert with --experts separate, then quantize the result"));
    }
    if (recipe.shape[0] > (tensors_max - made) / parts) {
      findings.push_back(cannot_cut(
          recipe,
          fmt::format(
              "would be split into more tensors than a file of this size can contain: {} at most",
              tensors_max),
          "exclude it (--exclude)"));
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

std::vector<Recipes> expert_layouts(const std::shared_ptr<const Catalog>& catalog) {
  std::vector<Recipes> layouts;
  // Fused experts need two model types, one for each name of the MoE module. Separate experts need
  // one model type for each ExpertNaming.
  for (const std::string_view model_type : {"", "lfm2_moe"}) {
    layouts.push_back(values_in(catalog, ExpertLayout::fused, model_type));
  }
  for (const std::string_view model_type : {"", "mixtral", "lfm2_moe"}) {
    layouts.push_back(values_in(catalog, ExpertLayout::separate, model_type));
    layouts.push_back(values_in(catalog, ExpertLayout::keep, model_type));
  }
  return layouts;
}

}  // namespace loadstone
