// Finds blocks of GGUF formats that have non-finite scales, or only scales of 0.
#pragma once

#include <cstddef>

#include "loadstone/dtype.h"

namespace loadstone {

// Returns true if a scale of the block is NaN or infinite, which makes the block's values invalid.
[[nodiscard]] bool has_nonfinite_scale(BlockFormat format, const std::byte* block) noexcept;
// Returns true if all F16 scales of the block are 0, so that all its values are 0. Returns false
// for formats without F16 scales.
[[nodiscard]] bool has_zero_scales(BlockFormat format, const std::byte* block) noexcept;

}  // namespace loadstone
