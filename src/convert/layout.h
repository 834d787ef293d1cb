// Which tensors stand in which file of an output, and where; and what memory that takes.
#pragma once

#include <cstdint>

#include "loadstone/convert.h"

namespace loadstone {

// Fills in files, index_name and bytes_to_write. Partners of one scale stand in one file, so that
// each file can be made by itself.
void lay_out(Conversion& conversion, const ConvertOptions& options);

// Fills in the budget and what follows from it; a finding where memory_bytes_max is too little.
void choose_sizes(Conversion& conversion, const ConvertOptions& options);

}  // namespace loadstone
