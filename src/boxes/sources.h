// Sources of boxes: tensors of a checkpoint, or decodings of some.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "boxes/merges.h"
#include "loadstone/recipe.h"
#include "loadstone/tensor_info.h"

namespace loadstone {

// The encoding of the box's elements when they are copied. Source and decoding must exist.
[[nodiscard]] Encoding encoding_of(const Box& box, const std::vector<TensorInfo>& tensors,
                                   std::span<const Decoding> decodings) noexcept;

// Returns all tensors that the boxes need, each once, in the boxes' order, without those that do
// not exist. `merge`: further terms of the boxes; may be null.
[[nodiscard]] std::vector<std::uint32_t> sources_of(std::span<const Box> boxes,
                                                    std::span<const Decoding> decodings,
                                                    const Merge* merge = nullptr);
// The sources of a recipe, including its merge.
template <typename Recipe>
[[nodiscard]] auto sources_of(const Recipe& recipe, std::span<const Decoding> decodings)
    -> decltype(sources_of(recipe.boxes, decodings, recipe.merge.get())) {
  return sources_of(recipe.boxes, decodings, recipe.merge.get());
}

}  // namespace loadstone
