// The configs that stand beside quantized tensors, and the other files of a model's folder.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "loadstone/convert.h"
#include "loadstone/plan.h"

namespace loadstone {

// What a config says of an output: names of modules, in the plan's order.
struct QuantizedModules {
  std::vector<std::string> plain;  // all that a server could quantize and that stays as it is
  // Modules that hold stacks of experts, none of which is quantized; `plain` has their parts.
  std::vector<std::string> stacks = {};
  // Those that are quantized, and how.
  std::vector<std::pair<std::string, const Quantization*>> quantized;

  // By their usual names too, if these are others.
  [[nodiscard]] std::vector<std::string> quantized_names() const;
};

// `repacked`: what is quantized without being encoded.
[[nodiscard]] QuantizedModules quantized_modules(const Plan& plan,
                                                 const std::vector<RepackedTensor>& repacked);

// Prefixes with * that cover the plain modules and no quantized one, as ModelOpt sums them up.
[[nodiscard]] std::vector<std::string> summed_up(const QuantizedModules& modules);

// hf_quant_config.json as ModelOpt writes it.
[[nodiscard]] std::string unified_config(const QuantizedModules& modules);
// "quantization_config" of config.json.
[[nodiscard]] std::string unified_section(const QuantizedModules& modules);
[[nodiscard]] std::string compressed_section(const QuantizedModules& modules);
[[nodiscard]] std::string section_of_bitsandbytes(const QuantizedModules& modules, Dtype dtype);

struct ConfigChanges {
  bool is_decoded = false;  // what the source had quantized is numbers now
  bool is_untied = false;   // tensors that the source ties have values of their own
};

// Sets the output's config and, for a folder, the files next to the model: those of `folder`, with
// config.json edited. Adds findings for what could not be written.
void settle_extras(Conversion& conversion, const ConvertOptions& options, const ModelFolder& folder,
                   ConfigChanges changes);

}  // namespace loadstone
