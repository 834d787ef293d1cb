// Writes the sections of configs that describe quantized tensors.
#pragma once

#include <string>

#include "convert/choose/quantize_config.h"

namespace loadstone {

// Returns hf_quant_config.json as ModelOpt writes it.
[[nodiscard]] std::string unified_config(const QuantizedModules& modules);
// Returns "quantization_config" of config.json.
[[nodiscard]] std::string unified_section(const QuantizedModules& modules);
[[nodiscard]] std::string compressed_section(const QuantizedModules& modules);
[[nodiscard]] std::string section_of_bitsandbytes(const QuantizedModules& modules, Dtype dtype);

}  // namespace loadstone
