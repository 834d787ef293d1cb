// Whether the configs beside a checkpoint claim that it is quantized.
#pragma once

#include <string>

#include "catalog/open_file.h"

namespace loadstone {

// Whether config.json or hf_quant_config.json in the folder says that the weights are quantized. A
// config that cannot be read may say so, and counts as if it did.
[[nodiscard]] bool claims_quantization(const FileOpener& opener, const std::string& folder);

}  // namespace loadstone
