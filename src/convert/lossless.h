// Enforces ConvertOptions::require_lossless.
#pragma once

#include <cstdint>

#include "convert/separate_experts.h"
#include "loadstone/convert.h"

namespace loadstone {

// Adds an error "convert.lossy" per change of encoding that loses values whatever they are.
void tell_losses(Conversion& conversion, SeparateExperts& separate);

// Throws Error "convert.lossy" if the target lost values and the conversion must be lossless.
void check_loss(const Conversion& conversion, std::uint32_t target, const EncodingLoss& loss);

}  // namespace loadstone
