// The form of quantized tensors in files: names, shapes and configs of the libraries that read
// them; and the other files of a model's folder.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "codec/encode.h"
#include "loadstone/convert.h"
#include "loadstone/plan.h"

namespace loadstone {

// The tensors that a target becomes in a file, without their places. The target itself where it is
// not quantized.
[[nodiscard]] std::vector<OutputTensor> output_tensors(const Conversion& conversion,
                                                       const PlannedTarget& target,
                                                       QuantizeStyle style);

// The naming style of components. Encodings of bitsandbytes have one style, whatever is asked for.
[[nodiscard]] NamingStyle naming_style(const WrittenEncoding& encoding,
                                       QuantizeStyle style) noexcept;
// Throws Error "internal" where the style has no such component.
[[nodiscard]] const ComponentName& component_of(const WrittenEncoding& encoding,
                                                QuantizeStyle style, std::string_view component);
// Returns the name of component number `part` of a target. The name of a parameter other than
// ".weight" becomes a part of it.
[[nodiscard]] std::string component_name(const std::string& target, std::size_t part,
                                         std::string_view suffix);

// Throws Error "plan.options" if the style cannot hold the encoding.
void check_style(const QuantizeOptions& options);

// The module that a weight belongs to: "a.weight" is of "a".
[[nodiscard]] std::string_view module_of(std::string_view name) noexcept;

// ---- configs

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

struct ConfigChanges {
  bool is_decoded = false;  // what the source had quantized is numbers now
  bool is_untied = false;   // tensors that the source ties have values of their own
};

// Sets the output's config and, for a folder, the files next to the model: those of `folder`, with
// config.json edited. Adds findings for what could not be written.
void settle_extras(Conversion& conversion, const ConvertOptions& options, const ModelFolder& folder,
                   ConfigChanges changes);

}  // namespace loadstone
