// Finds the sources of boxes: tensors of a checkpoint, or decodings of such tensors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "boxes/merges.h"
#include "loadstone/recipe.h"
#include "loadstone/tensor_info.h"

namespace loadstone {

// Returns the encoding of the elements that the box copies. The box's source and decoding must
// exist.
[[nodiscard]] Encoding encoding_of(const Box& box, const std::vector<TensorInfo>& tensors,
                                   std::span<const Decoding> decodings) noexcept;

// Returns all existing tensors that the boxes need, each once, in the boxes' order. `merge`: a
// merge whose terms are included; may be null.
[[nodiscard]] std::vector<std::uint32_t> sources_of(std::span<const Box> boxes,
                                                    std::span<const Decoding> decodings,
                                                    const Merge* merge = nullptr);
// Returns the sources of a recipe, including the sources of its merge.
template <typename Recipe>
[[nodiscard]] auto sources_of(const Recipe& recipe, std::span<const Decoding> decodings)
    -> decltype(sources_of(recipe.boxes, decodings, recipe.merge.get())) {
  return sources_of(recipe.boxes, decodings, recipe.merge.get());
}

}  // namespace loadstone
