// Compares files next to the models of a merge: the output has those of the first.
#pragma once

#include <vector>

#include "loadstone/convert.h"

namespace loadstone {

// Adds warnings for each further model: "merge.models" for other values in config.json (or, in
// GGUF, in the metadata of the architecture) and for another vocabulary, "convert.not_copied" for
// modules that are lost.
void tell_other_models(const Catalog& catalog, const MergeOptions& merge,
                       std::vector<Finding>& findings);

}  // namespace loadstone
