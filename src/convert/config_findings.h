// Reports parts of a source's configs that an output cannot keep: schemes of quantized activations
// and caches, lists of modules that rules rename, and the encoding of a single file.
#pragma once

#include <vector>

#include "loadstone/convert.h"
#include "loadstone/finding.h"

namespace loadstone {

// Warns ("convert.activations") of schemes and scales that an output with new configs loses: a
// cache's scheme and scales, and the scales of activations. For `--style` without quantization,
// also warns of a scheme of activations that differs from the source's. `source` has the source's
// configs.
void tell_schemes(const Conversion& conversion, const ConvertOptions& source,
                  std::vector<Finding>& findings);
// Reports ("convert.readers") that other libraries read the codes only from a folder with a config,
// or in a style that the caller did not choose.
void tell_readers(const Conversion& conversion, const ConvertOptions& source,
                  std::vector<Finding>& findings);
// Warns ("convert.unread") of codes in a single file of a model of diffusers, which only loadstone
// reads: diffusers takes the codes of a single file for values.
void tell_unread_file(const Conversion& conversion, const ConvertOptions& source,
                      std::vector<Finding>& findings);
// Warns ("convert.lists") of each list in the output's configs, such as "ignore", whose entries
// select different modules in the output than in the source because rules renamed modules.
void tell_old_names(const Conversion& conversion, std::vector<Finding>& findings);

}  // namespace loadstone
