// Compares the other files of a merge's inputs. The output has the files of the first model.
#pragma once

#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/finding.h"

namespace loadstone {

// Warns about each further model and each adapter's folder: "merge.models" if config.json (or, in
// GGUF, the architecture's metadata), the vocabulary or companion files differ from the first
// model's; "convert.not_copied" if the output lacks one of its modules. `given`: companion files of
// the output's folder.
void tell_other_models(const Catalog& catalog, const MergeOptions& merge, const ModelFolder& given,
                       std::vector<Finding>& findings);

}  // namespace loadstone
