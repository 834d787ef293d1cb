// The files of an output, and the resources to write them.
#pragma once

#include "loadstone/convert.h"

namespace loadstone {

// Sets files, index_name and bytes_to_write. Tensors that share a scale are in one file, so that
// each file can be made on its own.
void lay_out(Conversion& conversion, const ConvertOptions& options);

// Sets the budget and values derived from it; adds a finding if memory_bytes_max is too small.
void choose_sizes(Conversion& conversion, const ConvertOptions& options);

}  // namespace loadstone
