// Compares the configs and other files of an output with those of its sources.
#pragma once

#include <vector>

#include "loadstone/convert.h"

namespace loadstone {

// Adds warnings for each further model and each folder of an adapter: "merge.models" for other
// values in config.json (or, in GGUF, in the metadata of the architecture), for another vocabulary
// and for other files that libraries read with a model, "convert.not_copied" for modules that are
// lost. `given`: the files that the output gets, if it is a folder.
void tell_other_models(const Catalog& catalog, const MergeOptions& merge, const ModelFolder& given,
                       std::vector<Finding>& findings);

// Warns ("convert.activations") of what an output with other configs does not have. A cache: the
// scheme that the source's configs declare, and its scales. Activations of codes: their scales, and
// for `--style` alone a scheme that differs from the source's. `source` has the source's configs.
void tell_schemes(const Conversion& conversion, const ConvertOptions& source,
                  std::vector<Finding>& findings);

// Warns ("convert.lists") of each list of the output's configs, such as "ignore", that selects
// other modules of the output than it does of the source.
void tell_old_names(const Conversion& conversion, std::vector<Finding>& findings);

}  // namespace loadstone
