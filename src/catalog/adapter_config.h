// The scales of an adapter's products, from its configuration.
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

// A configuration of LoRA as peft writes it. Not thread-safe: it counts comparisons and doubts.
class AdapterConfig {
 public:
  // Throws Error "format.adapter" for an invalid configuration. `prefix`: of the fields that belong
  // to it; others are ignored.
  AdapterConfig(std::string_view text, std::string_view prefix);

  // Prefix of the modules that it describes, in the file's names; empty: all.
  [[nodiscard]] const std::string& prefix() const noexcept { return prefix_; }
  // Returns the factor of a module's product: alpha / rank, or alpha / sqrt(rank). Throws Error
  // "format.adapter" if the configuration has a different rank for the module.
  [[nodiscard]] float scale(const std::string& module, std::uint64_t rank) const;
  // Weights are stored as [in, out].
  [[nodiscard]] bool is_transposed() const noexcept { return is_transposed_; }
  // Every module has magnitudes.
  [[nodiscard]] bool has_magnitudes() const noexcept { return has_magnitudes_; }
  // Names, or suffixes of names, of modules with full tensors in the adapter (`modules_to_save`).
  [[nodiscard]] const std::vector<std::string>& saved_modules() const noexcept {
    return saved_modules_;
  }
  // Sentences without their subject, "the configuration": about fields that peft 0.21 does not
  // have, and about the alphas of modules that scale() was called for.
  [[nodiscard]] std::vector<std::string> doubts() const;

 private:
  // Values for the modules whose name a pattern matches.
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
  Rules ranks_;
  Rules alphas_;
  // Modules that keys of `alpha_pattern` give two alphas, and the sentence about the first.
  mutable std::size_t modules_with_two_alphas_ = 0;
  mutable std::string two_alphas_;
  bool has_root_scale_ = false;
  bool is_transposed_ = false;
  bool has_magnitudes_ = false;
};

inline constexpr const char* adapter_config_name = "adapter_config.json";

// The key of the metadata in which diffusers writes them.
inline constexpr const char* adapter_metadata_key = "lora_adapter_metadata";

// Returns an adapter's configurations: those that diffusers writes into the file's metadata, one
// per model of a pipeline, and then, for all other modules, adapter_config.json of the folder.
// Empty if there is neither.
[[nodiscard]] std::vector<AdapterConfig> adapter_configs(const Catalog& adapter);

// The one number of a small tensor, such as an alpha. Throws Error "format.adapter" for a tensor of
// another size or of a dtype that is neither a float nor an integer.
[[nodiscard]] float adapter_number(const Catalog& adapter, const TensorInfo& tensor);

// Returns the scale of a product with this stored alpha. If the configuration has a scale too, it
// must agree up to the rounding of the alpha; otherwise throws Error "format.adapter".
[[nodiscard]] float stored_scale(const Catalog& adapter, const TensorInfo& alpha,
                                 std::uint64_t rank, std::optional<float> configured);

}  // namespace loadstone
