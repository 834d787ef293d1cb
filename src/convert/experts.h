// Stacks of experts as the weights of single experts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Replaces each recipe of a tensor [experts, rows, columns] that a StackRule names, and that is
// `wanted`, by those of its experts' weights, which with the rest of their block get the model's
// words: "experts.3.gate_proj.weight". Models whose stacks are turned keep them. More than
// `tensors_max` new tensors are an error among the findings. Returns how many stacks were cut.
std::size_t split_stacks(Recipes& recipes, std::string_view model_type,
                         const std::function<bool(const TargetRecipe&)>& wanted,
                         std::uint64_t tensors_max, std::vector<Finding>& findings);

}  // namespace loadstone
