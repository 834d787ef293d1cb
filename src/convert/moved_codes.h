// Checks codes that an output copies unchanged.
#pragma once

#include <vector>

#include "loadstone/convert.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"

namespace loadstone {

// Returns true if a target copies codes of the source, as separate tensors or as blocks.
[[nodiscard]] bool moves_codes(const Plan& plan);
// Returns an error for each target whose codes readers of the output would misinterpret, such as
// joined experts with separate scales, or a weight that was renamed without its scales. Tensors in
// `repacked` already have the components that readers expect.
[[nodiscard]] std::vector<Finding> check_moved_codes(const Plan& plan,
                                                     const std::vector<RepackedTensor>& repacked,
                                                     bool dequantizes);
// Renames layers in metadata that declares the encodings of layers, and keeps only layers whose
// codes the plan copies. `drops_all`: keeps no layer. Values that the caller gave stay unchanged.
void keep_layer_metadata(Conversion& conversion, const ConvertOptions& options, bool drops_all);

}  // namespace loadstone
