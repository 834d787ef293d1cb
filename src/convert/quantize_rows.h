// Describes how a conversion changes the encodings of tensors.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "convert/choose/choose.h"
#include "convert/separate_experts.h"
#include "loadstone/convert.h"

namespace loadstone {

// Returns the encodings of the target's sources: "Q4_K", "fp8-block", or "BF16, F32".
[[nodiscard]] std::string source_encodings(const Plan& plan, const PlannedTarget& target);
// Returns the encoding that the target has in the output: "nvfp4", or "BF16".
[[nodiscard]] std::string_view output_encoding(const Conversion& conversion,
                                               const PlannedTarget& target);

// Returns a text such as "exact" or "lossy, with about 9.4 % error". `typical_error`: see
// QuantizeRow.
[[nodiscard]] std::string fidelity_text(Fidelity fidelity, double typical_error);

// The reason why a conversion decodes tensors that it does not quantize again.
enum class Decoded : std::uint8_t {
  on_request,  // or no tensor is decoded
  by_merge,
  by_quantization  // of other tensors
};

// Adds one row to the report per group of similar tensors. Reports quantized tensors that the
// conversion quantizes again, and those that it decodes for other reasons, once per pair of
// encodings.
void tell_quantized(Conversion& conversion, const Choices& choices, Decoded decoded,
                    SeparateExperts& separate);

}  // namespace loadstone
