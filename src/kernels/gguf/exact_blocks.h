// Encodes single blocks of GGUF exactly.
#pragma once

#include <cstddef>

#include "loadstone/dtype.h"

namespace loadstone {

// Replaces an encoded block by one that decodes to exactly these values. Leaves the block unchanged
// if the format has no such block, or if all its scales are computed by a search.
void encode_exactly(BlockFormat format, const float* values, std::byte* block) noexcept;

}  // namespace loadstone
