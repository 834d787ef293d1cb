// Reads an adapter's configuration, and computes the scales of the adapter's products from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "catalog/module_patterns.h"
#include "loadstone/catalog.h"

namespace loadstone {

// A LoRA configuration as peft writes it. Not thread-safe, because const functions count
// comparisons and doubts.
class AdapterConfig {
 public:
  // Throws Error "format.adapter" for an invalid configuration. Reads only the fields that begin
  // with `prefix`.
  AdapterConfig(std::string_view text, std::string_view prefix);

  // Returns the prefix of the modules that the configuration applies to; empty for all modules.
  [[nodiscard]] const std::string& prefix() const noexcept { return prefix_; }
  // Returns the factor of a module's product: alpha / rank, or alpha / sqrt(rank). Throws Error
  // "format.adapter" if the configuration has a different rank for the module.
  [[nodiscard]] float scale(const std::string& module, std::uint64_t rank) const;
  // Returns true if weights are stored as [in, out].
  [[nodiscard]] bool is_transposed() const noexcept { return is_transposed_; }
  // Returns true if every module has magnitudes (DoRA).
  [[nodiscard]] bool has_magnitudes() const noexcept { return has_magnitudes_; }
  // Returns names, or suffixes of names, of modules with full tensors in the adapter
  // (`modules_to_save`).
  [[nodiscard]] const std::vector<std::string>& saved_modules() const noexcept {
    return saved_modules_;
  }
  // Returns names, or suffixes of names, of the parameters that products adapt without a module
  // for each, such as "mlp.experts.down_proj" (`target_parameters`).
  [[nodiscard]] const std::vector<std::string>& parameters() const noexcept { return parameters_; }
  // Returns true if products of stacks [experts, out, in] have the factors of their matrices, as
  // since peft 0.19; false if they are the products of the transposes; nullopt if the configuration
  // does not contain peft's version.
  [[nodiscard]] std::optional<bool> swaps_stacks() const noexcept { return swaps_stacks_; }
  // Returns warnings, as sentences without their subject "the configuration". They are about fields
  // that peft 0.21 does not have, and about modules with two alphas for which scale() was called.
  [[nodiscard]] std::vector<std::string> doubts() const;

 private:
  // Values for modules, by patterns of module names.
  struct Rules {
    ModulePatterns patterns;
    std::vector<double> numbers;
    std::vector<std::string> keys;
    bool are_sorted = false;

    [[nodiscard]] double number(const std::string& module, double otherwise) const;
  };
  [[nodiscard]] double alpha_for(const std::string& module) const;

  std::string prefix_;
  double rank_ = 0;
  double alpha_ = 0;
  std::vector<std::string> unknown_;
  std::vector<std::string> saved_modules_;
  std::vector<std::string> parameters_;
  Rules ranks_;
  Rules alphas_;
  // Number of modules to which the keys of `alpha_pattern` give two alphas, and the description of
  // the first one.
  mutable std::size_t modules_with_two_alphas_ = 0;
  mutable std::string two_alphas_;
  std::optional<bool> swaps_stacks_;
  bool has_root_scale_ = false;
  bool is_transposed_ = false;
  bool has_magnitudes_ = false;
};

inline constexpr const char* adapter_config_name = "adapter_config.json";

// Metadata key under which diffusers writes configurations of adapters.
inline constexpr const char* adapter_metadata_key = "lora_adapter_metadata";

// Returns an adapter's configurations: those that diffusers writes into the file's metadata, one
// per model of a pipeline, and then, for all other modules, adapter_config.json of the folder.
// Empty if there is neither.
[[nodiscard]] std::vector<AdapterConfig> adapter_configs(const Catalog& adapter);

// Returns the value of a tensor with one element, such as an alpha. Throws Error "format.adapter"
// if the tensor has a different size, or a dtype that is neither a float nor an integer.
[[nodiscard]] float adapter_number(const Catalog& adapter, const TensorInfo& tensor);

// Returns the scale of a product with this stored alpha. If the configuration has a scale too, it
// must agree up to the rounding of the alpha; otherwise throws Error "format.adapter".
[[nodiscard]] float stored_scale(const Catalog& adapter, const TensorInfo& alpha,
                                 std::uint64_t rank, std::optional<float> configured);

}  // namespace loadstone
