// Weights of experts: what checkpoints call single ones, and stacks of them cut into these.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/finding.h"
#include "loadstone/recipe.h"

namespace loadstone {

enum class ExpertRole : std::uint8_t { gate, up, down };
inline constexpr std::array expert_roles = {ExpertRole::gate, ExpertRole::up, ExpertRole::down};

enum class ExpertWords : std::uint8_t {
  usual,   // "mlp.experts.3.gate_proj", "up_proj", "down_proj"
  mixtral  // "block_sparse_moe.experts.3.w1", "w3", "w2"
};

// The names that readers of a model look for.
struct ExpertNaming {
  ExpertWords words = ExpertWords::usual;  // of single experts
  // "block_sparse_moe" is "mlp" where the experts are one tensor.
  bool renames_block = true;
};
// `model_type` is a member of config.json.
[[nodiscard]] ExpertNaming expert_naming(std::string_view model_type);

// "gate_proj", "w1"
[[nodiscard]] std::string_view name(ExpertRole role, ExpertWords words) noexcept;

// Ends the name of a layer's gates and ups, if its experts are one tensor in a known layout.
inline constexpr std::string_view fused_gate_up = ".experts.gate_up_proj";

// "model.layers.0.mlp.experts.3.up_proj.weight"
struct ExpertName {
  std::string prefix;  // "model.layers.0.mlp.experts"
  std::uint64_t expert = 0;
  ExpertRole role = ExpertRole::gate;
  ExpertWords words = ExpertWords::usual;
};
[[nodiscard]] std::optional<ExpertName> expert_name(std::string_view name);

// The module of an expert by the usual words, by which servers ask for it; nothing if it has them,
// or is not an expert's.
[[nodiscard]] std::optional<std::string> usual_module(const std::string& module);

// A name in the block of experts, as a model has it whose experts are one tensor.
[[nodiscard]] std::string fused_name(std::string name, const ExpertNaming& naming);
// The reverse: as a model with single experts has it.
[[nodiscard]] std::string separate_name(std::string name, const ExpertNaming& naming);

// The module that holds a layer's experts and their router, with a dot: "model.layers.0.mlp." of
// "model.layers.0.mlp.experts".
[[nodiscard]] std::string_view block_of(std::string_view prefix) noexcept;
// Returns true if the name is of a tensor in one of these blocks.
[[nodiscard]] bool is_in_block(const std::set<std::string, std::less<>>& blocks,
                               std::string_view name);

// Replaces each recipe of a tensor [experts, rows, columns] that a StackRule names, and that is
// `wanted`, by those of its experts' weights, which with the rest of their block get the model's
// words: "experts.3.gate_proj.weight". Models whose stacks are turned keep them. More than
// `tensors_max` new tensors are an error among the findings. Returns how many stacks were cut.
std::size_t split_stacks(Recipes& recipes, std::string_view model_type,
                         const std::function<bool(const TargetRecipe&)>& wanted,
                         std::uint64_t tensors_max, std::vector<Finding>& findings);

// All values of a checkpoint, by the recipes of conversions that take experts apart, under either
// set of words, or join them. What is quantized is F32. A layout that fits nothing has the values
// as they are.
[[nodiscard]] std::vector<Recipes> expert_layouts(const std::shared_ptr<const Catalog>& catalog);

}  // namespace loadstone
