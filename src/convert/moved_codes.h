// Codes that an output copies unchanged.
#pragma once

#include <vector>

#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"

namespace loadstone {

// Returns true if a target copies codes of the source, in any container.
[[nodiscard]] bool moves_codes(const Plan& plan);
// Returns an error for each target whose codes readers of the output would misinterpret, such as
// joined experts with separate scales, or a weight that was renamed without its scales. `repacked`
// have the components that readers expect.
[[nodiscard]] std::vector<Finding> check_moved_codes(const Plan& plan,
                                                     const std::vector<RepackedTensor>& repacked,
                                                     bool dequantizes);
// Renames layers in header metadata that declare their encodings, and keeps only layers whose codes
// the plan copies; `drops_all`: no codes are copied. The caller's values stay unchanged.
void keep_layer_metadata(Conversion& conversion, const ConvertOptions& options, bool drops_all);

}  // namespace loadstone
