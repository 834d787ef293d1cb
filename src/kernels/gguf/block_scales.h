// The scales in blocks of GGUF.
#pragma once

#include <cstddef>

#include "loadstone/dtype.h"

namespace loadstone {

// Returns true if one of the block's scales is NaN or infinite, so that it has no valid values.
[[nodiscard]] bool has_nonfinite_scale(BlockFormat format, const std::byte* block) noexcept;

}  // namespace loadstone
