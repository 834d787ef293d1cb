// Finds the experts that a module changes if peft adapts whole stacks (`target_parameters`).
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "catalog/adapter_config.h"
#include "loadstone/shape.h"
#include "plan/adapter_names.h"
#include "plan/adapter_products.h"

namespace loadstone {

// Returns the shape of a tensor of the base; null if the base does not have it.
using ShapeOf = std::function<const Shape*(const std::string&)>;

// The product of one expert, and its place in the base.
struct ExpertProduct {
  AdapterPlace place;
  AdapterProduct product;
  std::string key;  // see key_in_config()
};

// Divides the product of a module into those of its experts. The module's name does not contain the
// parameter that it adapts, so the shapes decide among the configuration's parameters. The base may
// store the experts as a stack, or separately. Returns an empty vector if the base has no such
// parameter. Throws Error "merge.adapter" if no parameter fits, or several.
[[nodiscard]] std::vector<ExpertProduct> expert_products(std::string module,
                                                         const AdapterProduct& product,
                                                         const AdapterConfig& config,
                                                         const AdapterPlaces& places,
                                                         const ShapeOf& shape_of);

// Returns true if a stack of experts is stored as [experts, in, out], which the shape of the
// layer's other stack shows; nullopt without such a stack.
[[nodiscard]] std::optional<bool> is_transposed_stack(const std::string& name,
                                                      const ShapeOf& shape_of);

// Returns the name with which patterns of ranks and alphas are compared: that of the module, or of
// its weight if peft adapts it as a parameter.
[[nodiscard]] std::string key_in_config(const std::string& module, const AdapterConfig& config);

// Removes ".base_layer" from the end of a module's name: peft nests the modules of two parameters.
[[nodiscard]] std::string unwrapped_module(std::string module);

}  // namespace loadstone
