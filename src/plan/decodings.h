// What boxes copy from: a tensor of the checkpoint, or what a kernel makes of some.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/recipe.h"

namespace loadstone {

// What the box's elements are on the way. Source and decoding must be there.
[[nodiscard]] Encoding encoding_of(const Box& box, const std::vector<TensorInfo>& tensors,
                                   std::span<const Decoding> decodings) noexcept;

// All tensors that the boxes need, each once, in the order of the boxes. Those that are not there
// are left out.
[[nodiscard]] std::vector<std::uint32_t> sources_of(const std::vector<Box>& boxes,
                                                    std::span<const Decoding> decodings);

}  // namespace loadstone
