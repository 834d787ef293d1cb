// Quantized tensors in files: names, shapes and configs for the libraries that read them, and the
// other files of a model's folder.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "codec/encode.h"
#include "loadstone/convert.h"
#include "loadstone/plan.h"

namespace loadstone {

// Returns the tensors of a target in a file, without offsets; the target itself if it is not
// quantized.
[[nodiscard]] std::vector<OutputTensor> output_tensors(const Conversion& conversion,
                                                       const PlannedTarget& target,
                                                       QuantizeStyle style);

// Returns the naming style of components. bitsandbytes' encodings have one style only.
[[nodiscard]] NamingStyle naming_style(const WrittenEncoding& encoding,
                                       QuantizeStyle style) noexcept;
// Throws Error "internal" if the style has no such component.
[[nodiscard]] const ComponentName& component_of(const WrittenEncoding& encoding,
                                                QuantizeStyle style, std::string_view component);
// Returns the name of component number `part` of a target. If the parameter is not ".weight", its
// name is part of the result.
[[nodiscard]] std::string component_name(const std::string& target, std::size_t part,
                                         std::string_view suffix);

// Throws Error "plan.options" if the style does not support the encoding.
void check_style(const QuantizeOptions& options);

// Returns the module of a weight: "a" for "a.weight".
[[nodiscard]] std::string_view module_of(std::string_view name) noexcept;

// ---- configs

// Content of an output's config: names of modules, in the plan's order.
struct QuantizedModules {
  std::vector<std::string> plain;  // modules that a server could quantize and that are unchanged
  // Modules with unquantized stacks of experts; `plain` has their parts.
  std::vector<std::string> stacks = {};
  // Quantized modules with their quantization.
  std::vector<std::pair<std::string, const Quantization*>> quantized;

  // Includes their usual names, if these differ.
  [[nodiscard]] std::vector<std::string> quantized_names() const;
};

// `repacked`: quantized tensors that are not encoded again.
[[nodiscard]] QuantizedModules quantized_modules(const Plan& plan,
                                                 const std::vector<RepackedTensor>& repacked);

// Returns prefixes with * that cover the plain modules and no quantized one, as ModelOpt does.
[[nodiscard]] std::vector<std::string> summed_up(const QuantizedModules& modules);

struct ConfigChanges {
  bool is_decoded = false;  // a quantized tensor of the source is decoded
  bool is_untied = false;   // tensors that the source ties have separate values
};

// Sets the output's config and, for a folder, the files next to the model: those of `folder`, with
// config.json edited. Adds findings for files that cannot be written.
void settle_extras(Conversion& conversion, const ConvertOptions& options, const ModelFolder& folder,
                   ConfigChanges changes);

}  // namespace loadstone
