// Quantized activations and caches, which a config declares next to the weights.
#pragma once

#include <vector>

#include "loadstone/convert.h"

namespace loadstone {

// Warns ("convert.activations") of what an output with other configs does not have. A cache: the
// scheme that the source's configs declare, and its scales. Activations of codes: their scales, and
// for `--style` alone a scheme that differs from the source's. `source` has the source's configs.
void tell_schemes(const Conversion& conversion, const ConvertOptions& source,
                  std::vector<Finding>& findings);

}  // namespace loadstone
