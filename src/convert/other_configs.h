// Compares what the models of a merge declare: the output has the declarations of the first.
#pragma once

#include <vector>

#include "loadstone/convert.h"

namespace loadstone {

// Adds a warning "merge.models" for each model whose config.json, or GGUF metadata of the
// architecture, has other values than the first model's.
void tell_other_configs(const Catalog& catalog, const ConvertOptions& options,
                        std::vector<Finding>& findings);

}  // namespace loadstone
