// The scales that blocks of GGUF hold.
#pragma once

#include <cstddef>

#include "loadstone/dtype.h"

namespace loadstone {

// Whether one of the block's scales is NaN or infinite: such a block has no numbers.
[[nodiscard]] bool has_nonfinite_scale(BlockFormat format, const std::byte* block) noexcept;

}  // namespace loadstone
