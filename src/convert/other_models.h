// Files of all inputs of a merge: the output has those of the first model.
#pragma once

#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"

namespace loadstone {

// Adds warnings for each further model and each folder of an adapter: "merge.models" for other
// values in config.json (or, in GGUF, in the metadata of the architecture), for another vocabulary
// and for other files that libraries read with a model, "convert.not_copied" for modules that are
// lost. `given`: the files that the output gets, if it is a folder.
void tell_other_models(const Catalog& catalog, const MergeOptions& merge, const ModelFolder& given,
                       std::vector<Finding>& findings);

}  // namespace loadstone
