// A plain loop for each block format, from docs/formats/gguf-blocks.md: slow, one number at a time.
#pragma once

#include <cstddef>
#include <vector>

#include "loadstone/dtype.h"

namespace loadstone::reference {

// Where a block holds scales of 16 bits.
std::vector<std::size_t> half_places(BlockFormat format);

}  // namespace loadstone::reference
