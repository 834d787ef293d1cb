// Finds blocks of GGUF formats that have non-finite scales.
#pragma once

#include <cstddef>

#include "loadstone/dtype.h"

namespace loadstone {

// Returns true if a scale of the block is NaN or infinite, which makes the block's values invalid.
[[nodiscard]] bool has_nonfinite_scale(BlockFormat format, const std::byte* block) noexcept;

}  // namespace loadstone
