// Enforces ConvertOptions::require_lossless, and reports losses of values.
#pragma once

#include <cfloat>
#include <cstdint>
#include <map>

#include "convert/separate_experts.h"
#include "loadstone/convert.h"

namespace loadstone {

// The approximate relative error of values whose scale is stored as the nearest inverse in F32.
inline constexpr double inverse_error = FLT_EPSILON;

// Adds an error "convert.lossy" per change of encoding that loses values whatever they are.
void tell_losses(Conversion& conversion, SeparateExperts& separate);

// Throws Error "convert.lossy" if the target lost values and the conversion must be lossless.
void check_loss(const Conversion& conversion, std::uint32_t target, const EncodingLoss& loss);

// Adds the losses of requantized targets to the report, and a warning "convert.underflow" for each
// encoding with blocks that became 0.
void report_losses(const Conversion& conversion,
                   const std::map<std::uint32_t, EncodingLoss>& losses, ConvertReport& report);

}  // namespace loadstone
