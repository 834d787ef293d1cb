#include "convert/separate_experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>

#include "convert/choose/chooser.h"
#include "convert/choose/quantize_rules.h"
#include "convert/kept_blocks.h"
#include "convert/output_recipes.h"
#include "convert/values.h"

namespace loadstone {

SeparateExperts::SeparateExperts(std::shared_ptr<const Catalog> catalog,
                                 const ConvertOptions& options)
    : options_(options), fidelities_(plan_) {
  plan_.catalog = std::move(catalog);
}

void SeparateExperts::make_plan() {
  if (std::exchange(is_planned_, true)) return;
  const bool has_choice =
      options_.experts == ExpertLayout::keep && !options_.merge && !names_are_given(options_);
  if (!has_choice) return;
  ConvertOptions separate = options_;
  separate.experts = ExpertLayout::separate;
  std::vector<Finding> findings;  // findings of a conversion that nobody asked for
  Recipes recipes = output_recipes(plan_.catalog, separate, true, findings).recipes;
  plan_.decodings = std::move(recipes.decodings);
  plan_.targets.reserve(recipes.targets.size());
  for (TargetRecipe& recipe : recipes.targets) {
    PlannedTarget& target = plan_.targets.emplace_back();
    target.name = std::move(recipe.target);
    target.shape = std::move(recipe.shape);
    target.dtype = recipe.dtype;
    target.recipe.boxes = std::move(recipe.boxes);
    for (const Box& box : target.recipe.boxes) by_source_[box.source].push_back(&target);
  }
}

std::set<const PlannedTarget*> SeparateExperts::experts_of(const PlannedTarget& stack) {
  if (stack.shape.rank() != 3) return {};
  make_plan();
  std::set<const PlannedTarget*> experts;
  for (const Box& box : stack.recipe.boxes) {
    const auto found = by_source_.find(box.source);
    if (found != by_source_.end()) experts.insert(found->second.begin(), found->second.end());
  }
  const auto is_cut = [](const PlannedTarget* each) { return each->shape.rank() == 2; };
  return std::ranges::all_of(experts, is_cut) ? experts : std::set<const PlannedTarget*>();
}

Fidelity SeparateExperts::fidelity(const PlannedTarget& stack, const Quantization& quantization) {
  const auto experts = experts_of(stack);
  Fidelity worst = experts.empty() ? Fidelity::lossy : Fidelity::exact;
  for (const PlannedTarget* const expert : experts) {
    worst = std::max(worst, fidelities_.of(*expert, quantization));
  }
  return worst;
}

bool SeparateExperts::keep_blocks(const PlannedTarget& stack) {
  const auto experts = experts_of(stack);
  return !experts.empty() && std::ranges::all_of(experts, [&](const PlannedTarget* expert) {
    const TargetRecipe recipe = {
        .target = expert->name, .shape = expert->shape, .boxes = expert->recipe.boxes};
    return blocks_to_keep(*plan_.catalog, plan_.decodings, recipe).has_value();
  });
}

std::string SeparateExperts::advice() const {
  const bool is_compressed = options_.quantize.style == QuantizeStyle::compressed_tensors;
  const RuleUse use = is_compressed ? RuleUse::split : RuleUse::scattered;
  const Chooser chooser(options_.quantize, options_.folder.config);
  const bool is_read = options_.format == FileFormat::gguf ||
                       chooser.first_rule(use, "mlp.experts.0.up_proj.weight") == nullptr;
  return fmt::format("separate the experts (--experts separate){}",
                     is_read ? ""
                             : ", which then only loadstone.open() reads: no output keeps these "
                               "values in this encoding and the stacks that libraries read");
}

}  // namespace loadstone
