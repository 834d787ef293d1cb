// Reports parts of a source's configs that an output cannot keep: schemes of quantized activations
// and caches, and lists of modules that rules rename.
#pragma once

#include <vector>

#include "loadstone/convert.h"
#include "loadstone/finding.h"

namespace loadstone {

// Warns ("convert.activations") of schemes and scales that an output with new configs loses. For a
// cache: the scheme in the source's configs, and its scales. For activations: their scales, and for
// `--style` without quantization also a scheme that differs from the source's. `source` has the
// source's configs.
void tell_schemes(const Conversion& conversion, const ConvertOptions& source,
                  std::vector<Finding>& findings);
// Warns ("convert.lists") of each list in the output's configs, such as "ignore", whose entries
// select different modules in the output than in the source because rules renamed modules.
void tell_old_names(const Conversion& conversion, std::vector<Finding>& findings);

}  // namespace loadstone
