// Codes that an output gets as they are.
#pragma once

#include <vector>

#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"

namespace loadstone {

// Returns true if a target gets codes of the source as they are, whatever their container.
[[nodiscard]] bool moves_codes(const Plan& plan);
// An error for each target that holds codes which readers of the output would take for something
// else: experts that are joined while their scales stay one by one, say, or a weight that was
// renamed without them. `repacked` have the components that readers look for.
[[nodiscard]] std::vector<Finding> check_moved_codes(const Plan& plan,
                                                     const std::vector<RepackedTensor>& repacked,
                                                     bool dequantizes);
// Keeps, in the header's metadata that names the encoding of each layer, the layers whose codes the
// plan moves as they are, under the names that they get; `drops_all`: no codes stay. Values that
// the caller gave are not changed.
void keep_layer_metadata(Conversion& conversion, const ConvertOptions& options, bool drops_all);

}  // namespace loadstone
