// Stacks of experts as the weights of single experts.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Replaces each recipe of a tensor [experts, rows, columns] that a StackRule names, and that is
// `wanted`, by those of its experts' weights: "experts.3.gate_proj.weight". Models whose stacks are
// turned keep them. More than `tensors_max` new tensors are an error among the findings.
void split_stacks(Recipes& recipes, std::string_view model_type,
                  const std::function<bool(const TargetRecipe&)>& wanted, std::uint64_t tensors_max,
                  std::vector<Finding>& findings);

}  // namespace loadstone
