// The files of an output, and what writing them takes.
#pragma once

#include "loadstone/convert.h"

namespace loadstone {

// Fills in files, index_name and bytes_to_write. Partners of one scale get one file, so that each
// file can be made by itself.
void lay_out(Conversion& conversion, const ConvertOptions& options);

// Fills in the budget and the values derived from it; a finding where memory_bytes_max is too
// little.
void choose_sizes(Conversion& conversion, const ConvertOptions& options);

}  // namespace loadstone
