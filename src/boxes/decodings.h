// Makes recipes that read a tensor of the checkpoint, or a tensor decoded from several.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "boxes/sources.h"
#include "boxes/value.h"
#include "boxes/view.h"
#include "loadstone/catalog.h"
#include "loadstone/recipe.h"

namespace loadstone {

// A recipe for a whole tensor. Codes and blocks are decoded to F32, or to BF16 or F16 if `wanted`.
struct TensorRecipe {
  Shape shape;
  Dtype dtype = Dtype::f32;  // before any cast
  std::vector<Box> boxes;
  std::vector<Decoding> decodings;

  // Returns a Value that refers to this recipe. The recipe must outlive the Value.
  [[nodiscard]] Value as_value(std::string_view name, Dtype as) const noexcept {
    return {.name = name, .shape = &shape, .dtype = as, .boxes = boxes};
  }
};
[[nodiscard]] TensorRecipe tensor_recipe(const Catalog& catalog, std::uint32_t tensor,
                                         std::optional<Dtype> wanted = std::nullopt);

// Returns true for FP8 tensors that no codec uses as codes or companions, so that they are values.
[[nodiscard]] bool is_plain_fp8(const Catalog& catalog, std::uint32_t tensor);

// Return a view of the decoded values of codes or blocks as the source with index `number`, and
// their decoding.
[[nodiscard]] View numbers_view(const Catalog& catalog, std::uint32_t tensor, std::uint32_t number);
[[nodiscard]] Decoding numbers_decoding(const Catalog& catalog, std::uint32_t tensor, Dtype dtype);

// Returns the paths of the checkpoints after the first that a recipe reads, in their order.
[[nodiscard]] std::vector<std::string> merged_paths(const Catalog& catalog,
                                                    std::span<const Decoding> decodings,
                                                    const Recipe& recipe);

}  // namespace loadstone
