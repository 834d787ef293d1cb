// What boxes copy from: a tensor of the checkpoint, or what a kernel makes of some.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/decode.h"
#include "loadstone/catalog.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Checks everything about a decoding: that its sources are there and its kernel takes them.
[[nodiscard]] std::optional<DecodeProblem> check_decoding(const std::vector<TensorInfo>& tensors,
                                                          const Decoding& decoding,
                                                          DecodeForm& form);

// What the box's elements are on the way. Source and decoding must be there.
[[nodiscard]] Encoding encoding_of(const Box& box, const std::vector<TensorInfo>& tensors,
                                   std::span<const Decoding> decodings) noexcept;

// All tensors that the boxes need, each once, in the order of the boxes. Those that are not there
// are left out.
[[nodiscard]] std::vector<std::uint32_t> sources_of(const std::vector<Box>& boxes,
                                                    std::span<const Decoding> decodings);

}  // namespace loadstone
