// The other files of a merge's inputs; the output has those of the first model.
#pragma once

#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"

namespace loadstone {

// Adds warnings for each further model and each adapter's folder: "merge.models" for different
// values in config.json (or, in GGUF, in the architecture's metadata), for a different vocabulary,
// and for other files that libraries read with a model; "convert.not_copied" for lost modules.
// `given`: the files of the output's folder, if it is one.
void tell_other_models(const Catalog& catalog, const MergeOptions& merge, const ModelFolder& given,
                       std::vector<Finding>& findings);

}  // namespace loadstone
