// Declares the names and shapes of quantized tensors in files, the configs for the libraries that
// read them, and the other files of a model's folder.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "codec/encode.h"
#include "loadstone/convert.h"
#include "loadstone/plan.h"

namespace loadstone {

// Returns the tensors that a file stores for a target, without offsets. For a target that is not
// quantized, this is the target itself.
[[nodiscard]] std::vector<OutputTensor> output_tensors(const Conversion& conversion,
                                                       const PlannedTarget& target,
                                                       QuantizeStyle style);

// Returns the naming style of components. bitsandbytes' encodings have one style only.
[[nodiscard]] NamingStyle naming_style(const WrittenEncoding& encoding,
                                       QuantizeStyle style) noexcept;
// Returns the style's name for a component. Throws Error "internal" if the style has no such
// component.
[[nodiscard]] const ComponentName& component_of(const WrittenEncoding& encoding,
                                                QuantizeStyle style, std::string_view component);
// Returns the name in files of the component with index `part`. The name contains the parameter's
// name, unless that is ".weight".
[[nodiscard]] std::string component_name(const std::string& target, std::size_t part,
                                         std::string_view suffix);

// Returns compressed-tensors if one of the encodings exists in this style only.
[[nodiscard]] std::optional<QuantizeStyle> only_style(const QuantizeOptions& options);
// Throws Error "plan.options" if the style does not support the encoding.
void check_style(const QuantizeOptions& options);

// Returns the module of a weight: "a" for "a.weight".
[[nodiscard]] std::string_view module_of(std::string_view name) noexcept;

// ---- configs

// Modules that an output's config lists, in the plan's order.
struct QuantizedModules {
  std::vector<std::string> plain;  // modules that a server could quantize and that are unchanged
  // Modules that no reader quantizes, such as norms.
  std::vector<std::string> others = {};
  // Modules with unquantized stacks of experts; `plain` has their parts.
  std::vector<std::string> stacks = {};
  // Quantized modules with their quantization.
  std::vector<std::pair<std::string, const Quantization*>> quantized;

  // Returns the names of the quantized modules, and their usual names if these differ.
  [[nodiscard]] std::vector<std::string> quantized_names() const;
};

// `repacked`: quantized tensors that are not encoded again.
[[nodiscard]] QuantizedModules quantized_modules(const Plan& plan,
                                                 const std::vector<RepackedTensor>& repacked);

struct ConfigChanges {
  bool is_decoded = false;  // a quantized tensor of the source is decoded
  bool is_untied = false;   // tensors that are tied in the source have separate values
};

// Sets the output's config. For a folder, also sets the files next to the model: the files of
// `folder`, with config.json edited. Adds findings for files that cannot be written.
void settle_extras(Conversion& conversion, const ConvertOptions& options, const ModelFolder& folder,
                   ConfigChanges changes);

}  // namespace loadstone
