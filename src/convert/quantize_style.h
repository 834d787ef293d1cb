// How quantized tensors stand in files: names, shapes and configs of the libraries that read them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "loadstone/convert.h"
#include "loadstone/plan.h"

namespace loadstone {

// The tensors that a target becomes in a file, without their places. The target itself where it is
// not quantized.
[[nodiscard]] std::vector<OutputTensor> output_tensors(const Conversion& conversion,
                                                       const PlannedTarget& target,
                                                       QuantizeStyle style);

// What of the encoding's name and the style's is asked for together: Error "plan.options" where the
// style does not have it.
void check_style(const QuantizeOptions& options);

// The module that a weight belongs to: "a.weight" is of "a".
[[nodiscard]] std::string_view module_of(std::string_view name) noexcept;

}  // namespace loadstone
