#include "plan/adapter_stacks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "base/text.h"

namespace loadstone {

namespace {

// The tensors of the base that hold one parameter: a stack, or several per expert.
struct Parameter {
  std::string name;
  std::string key;                                 // the module's name and the parameter's
  std::vector<std::vector<AdapterPlace>> experts;  // empty for a stack
};

// Returns the parts of a parameter that checkpoints store separately, in the order of its rows.
std::vector<std::string_view> parts_of(std::string_view parameter) {
  if (parameter == "gate_up_proj") return {"gate_proj", "up_proj"};
  return {parameter};
}

std::vector<std::vector<AdapterPlace>> separate_experts(const std::string& module,
                                                        std::string_view parameter,
                                                        const AdapterPlaces& places) {
  std::vector<std::vector<AdapterPlace>> experts;
  for (;;) {
    std::vector<AdapterPlace> parts;
    for (const std::string_view part : parts_of(parameter)) {
      auto found = places.find(fmt::format("{}.{}.{}", module, experts.size(), part));
      if (found.size() != 1 || found[0].part != AdapterPlace::Part::all) return experts;
      parts.push_back(std::move(found[0]));
    }
    experts.push_back(std::move(parts));
  }
}

// Returns the parameters that the module can have, and that the base has.
std::vector<Parameter> parameters_of(const std::string& module,
                                     const std::vector<std::string>& names,
                                     const AdapterPlaces& places) {
  std::vector<Parameter> found;
  for (const std::string& name : names) {
    const auto dot = name.rfind('.');
    const std::string parent = dot == std::string::npos ? "" : name.substr(0, dot);
    if (!parent.empty() && !("." + module).ends_with("." + parent)) continue;
    const std::string leaf = name.substr(dot == std::string::npos ? 0 : dot + 1);
    const auto stack = places.find(module + "." + leaf);
    if (stack.size() == 1 && stack[0].part == AdapterPlace::Part::all) {
      found.push_back({stack[0].name, module + "." + leaf, {}});
    } else if (auto experts = separate_experts(module, leaf, places); !experts.empty()) {
      found.push_back({module + "." + leaf, module + "." + leaf, std::move(experts)});
    }
  }
  return found;
}

bool fits_stack(const Shape& shape, const AdapterProduct& product) {
  if (shape.rank() != 3 || shape[0] == 0 || product.rank % shape[0] != 0) return false;
  const bool is_straight = shape[1] == product.out && shape[2] == product.in;
  // peft adds the product of a single expert as it is.
  return is_straight || (shape[0] > 1 && shape[1] == product.in && shape[2] == product.out);
}

// Returns true if the parts of each expert have the product's shape together.
bool fits_experts(const Parameter& parameter, const AdapterProduct& product,
                  const ShapeOf& shape_of) {
  if (product.rank % parameter.experts.size() != 0) return false;
  for (const auto& parts : parameter.experts) {
    for (const AdapterPlace& part : parts) {
      const Shape& shape = *shape_of(part.name);
      const bool fits =
          shape.rank() == 2 && shape[0] * parts.size() == product.out && shape[1] == product.in;
      if (!fits) return false;
    }
  }
  return true;
}

// Returns rows of the product of one expert. peft stores the ranks of all experts: expert by expert
// in the right matrix, and rank by rank in the left one.
AdapterProduct rows_of_expert(const AdapterProduct& stack, std::uint64_t expert,
                              std::uint64_t experts, std::uint64_t row, std::uint64_t rows) {
  AdapterProduct one = stack;
  one.rank = stack.rank / experts;
  one.out = rows;
  static_cast<void>(slice(one.right, 0, expert * one.rank, one.rank));
  static_cast<void>(reshape(one.left, {stack.out, one.rank, experts}));
  static_cast<void>(slice(one.left, 2, expert, 1));
  static_cast<void>(slice(one.left, 0, row, rows));
  static_cast<void>(reshape(one.left, {rows, one.rank}));
  return one;
}

std::vector<ExpertProduct> divided(const Parameter& parameter, const AdapterProduct& product,
                                   const ShapeOf& shape_of) {
  std::vector<ExpertProduct> made;
  if (parameter.experts.empty()) {
    const std::uint64_t experts = (*shape_of(parameter.name))[0];
    for (std::uint64_t i = 0; i < experts; ++i) {
      ExpertProduct& one = made.emplace_back();
      one.place = {.name = parameter.name, .part = AdapterPlace::Part::expert, .expert = i};
      one.product = rows_of_expert(product, i, experts, 0, product.out);
    }
    return made;
  }
  for (std::uint64_t i = 0; i < parameter.experts.size(); ++i) {
    std::uint64_t row = 0;
    for (const AdapterPlace& part : parameter.experts[i]) {
      const std::uint64_t rows = (*shape_of(part.name))[0];
      made.push_back({part, rows_of_expert(product, i, parameter.experts.size(), row, rows)});
      row += rows;
    }
  }
  return made;
}

}  // namespace

std::optional<bool> is_transposed_stack(const std::string& name, const ShapeOf& shape_of) {
  constexpr std::array<std::string_view, 2> leaves = {"gate_up_proj", "down_proj"};
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (!name.ends_with(leaves[i])) continue;
    const std::string parent = name.substr(0, name.size() - leaves[i].size());
    const Shape* const other = shape_of(fmt::format("{}{}", parent, leaves[1 - i]));
    // The stack is square, so the other is either twice as wide or half as wide as it is high.
    const bool tells = other != nullptr && other->rank() == 3 && (*other)[1] != (*other)[2];
    if (tells) return (*other)[1] < (*other)[2];
  }
  return std::nullopt;
}

std::string key_in_config(const std::string& module, const AdapterConfig& config) {
  const std::string weight = unwrapped_module(module) + ".weight";
  const bool is_parameter = std::ranges::any_of(config.parameters(), [&](const auto& parameter) {
    return ("." + weight).ends_with("." + parameter);
  });
  return is_parameter ? weight : module;
}

std::string unwrapped_module(std::string module) {
  constexpr std::string_view wrapper = ".base_layer";
  while (module.ends_with(wrapper)) module.resize(module.size() - wrapper.size());
  return module;
}

std::vector<ExpertProduct> expert_products(std::string module, const AdapterProduct& product,
                                           const AdapterConfig& config, const AdapterPlaces& places,
                                           const ShapeOf& shape_of) {
  module = unwrapped_module(std::move(module));
  const std::vector<Parameter> known = parameters_of(module, config.parameters(), places);
  const Parameter* chosen = nullptr;
  for (const Parameter& each : known) {
    const bool fits = each.experts.empty() ? fits_stack(*shape_of(each.name), product)
                                           : fits_experts(each, product, shape_of);
    if (!fits) continue;
    if (chosen != nullptr) {
      refuse_unfit(fmt::format("a LoRA product fits both '{}' and '{}'", printable(chosen->name),
                               printable(each.name)));
    }
    chosen = &each;
  }
  if (known.empty()) return {};
  if (chosen == nullptr) {
    refuse_unfit(fmt::format("a LoRA product does not fit the experts in '{}'",
                             printable(known.front().name)),
                 fmt::format("[{}, {}] of rank {}", product.out, product.in, product.rank));
  }
  std::vector<ExpertProduct> made = divided(*chosen, product, shape_of);
  const auto swaps = config.swaps_stacks();
  for (ExpertProduct& each : made) {
    if (made.size() == 1) {
      each.place.is_transposed = false;
    } else if (swaps) {
      each.place.is_transposed =
          *swaps ? is_transposed_stack(each.place.name, shape_of) : std::optional(true);
    }
    each.key = chosen->key;
  }
  return made;
}

}  // namespace loadstone
