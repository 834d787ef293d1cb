// Divides an output into files, and chooses the memory and threads to write them.
#pragma once

#include "loadstone/convert.h"

namespace loadstone {

// Sets files, index_name and bytes_to_write. Puts tensors that share a scale in one file, so that
// each file can be made independently.
void lay_out(Conversion& conversion, const ConvertOptions& options);

// Sets the budget and the values derived from it. Adds a finding if memory_bytes_max is too small.
void choose_sizes(Conversion& conversion, const ConvertOptions& options);

}  // namespace loadstone
