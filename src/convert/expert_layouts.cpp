#include "convert/expert_layouts.h"

#include <string>
#include <utility>

#include "catalog/expert_series.h"
#include "convert/experts.h"
#include "convert/outputs.h"

namespace loadstone {

namespace {

Recipes values_in(const std::shared_ptr<const Catalog>& catalog, ExpertLayout layout,
                  std::string_view model_type) {
  ConvertOptions options;
  options.experts = layout;
  options.dequantize = true;
  options.block_dtype = Dtype::f32;
  options.folder.config = "{\"model_type\": \"" + std::string(model_type) + "\"}";
  std::vector<Finding> findings;  // of the conversion, which is not to be judged here
  Recipes recipes = output_recipes(catalog, options, true, findings).recipes;
  if (layout == ExpertLayout::keep) {
    const auto is_wanted = [](const TargetRecipe&) { return true; };
    split_stacks(recipes, model_type, is_wanted, cut_experts_max(*catalog), findings);
  }
  return recipes;
}

}  // namespace

std::vector<Recipes> expert_layouts(const std::shared_ptr<const Catalog>& catalog) {
  std::vector<Recipes> layouts;
  // Two model types whose blocks of experts differ, then one for each ExpertNaming.
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
