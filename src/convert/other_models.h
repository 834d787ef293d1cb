// The other files of a merge's inputs; the output has those of the first model.
#pragma once

#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"

namespace loadstone {

// Warns for each further model and each adapter's folder: "merge.models" if config.json (or, in
// GGUF, the architecture's metadata), the vocabulary or companion files differ;
// "convert.not_copied" for modules that are lost. `given`: companion files of the output's folder.
void tell_other_models(const Catalog& catalog, const MergeOptions& merge, const ModelFolder& given,
                       std::vector<Finding>& findings);

}  // namespace loadstone
