// Names the weights of experts in checkpoints, and cuts stacks of experts into single experts.
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

// The names of experts that a model's readers expect.
struct ExpertNaming {
  ExpertWords words = ExpertWords::usual;  // names of single experts
  // True if "block_sparse_moe" is renamed to "mlp" when the experts are one tensor.
  bool renames_block = true;
};
// `model_type`: the value of "model_type" in config.json.
[[nodiscard]] ExpertNaming expert_naming(std::string_view model_type);

// "gate_proj", "w1"
[[nodiscard]] std::string_view name(ExpertRole role, ExpertWords words) noexcept;

// Suffix of the tensor that contains the gate and up projections of all experts of a layer.
inline constexpr std::string_view fused_gate_up = ".experts.gate_up_proj";

// "model.layers.0.mlp.experts.3.up_proj.weight"
struct ExpertName {
  std::string prefix;  // "model.layers.0.mlp.experts"
  std::uint64_t expert = 0;
  ExpertRole role = ExpertRole::gate;
  ExpertWords words = ExpertWords::usual;
};
[[nodiscard]] std::optional<ExpertName> expert_name(std::string_view name);

// Returns an expert's module with the usual names, under which servers look it up; nullopt if the
// module has these names already or is not an expert.
[[nodiscard]] std::optional<std::string> usual_module(const std::string& module);

// Renames a tensor or module of an experts' block as in a model with fused experts.
[[nodiscard]] std::string fused_name(std::string name, const ExpertNaming& naming);
// Renames a tensor or module of an experts' block as in a model with single experts.
[[nodiscard]] std::string separate_name(std::string name, const ExpertNaming& naming);

// Returns the module that contains a layer's experts and router, with a dot: "model.layers.0.mlp."
// for "model.layers.0.mlp.experts".
[[nodiscard]] std::string_view block_of(std::string_view prefix) noexcept;
// Returns true if the tensor belongs to one of these blocks; see block_of().
[[nodiscard]] bool is_in_block(const std::set<std::string, std::less<>>& blocks,
                               std::string_view name);

// Replaces each recipe of a tensor [experts, rows, columns] that matches a StackRule and is
// `wanted` by recipes for the weights of single experts. The new tensors, and the other tensors of
// their block, get the names of the model type: "experts.3.gate_proj.weight". Model types with
// transposed stacks keep their stacks. Adds an error to the findings if there would be more than
// `tensors_max` new tensors. Returns the number of cut stacks.
std::size_t split_stacks(Recipes& recipes, std::string_view model_type,
                         const std::function<bool(const TargetRecipe&)>& wanted,
                         std::uint64_t tensors_max, std::vector<Finding>& findings);

// Returns recipes for all values of a checkpoint in several layouts: with separate experts under
// either set of names, and with joined experts. Quantized tensors become F32. If a layout does not
// apply, its recipes leave the experts unchanged.
[[nodiscard]] std::vector<Recipes> expert_layouts(const std::shared_ptr<const Catalog>& catalog);

}  // namespace loadstone
