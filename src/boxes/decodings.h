// What boxes copy from: a tensor of the checkpoint, or what a kernel makes of some.
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

// All of one tensor, decoded where its bytes are codes or blocks: to F32, or to BF16 or F16 where
// that is `wanted`.
struct TensorRecipe {
  Shape shape;
  Dtype dtype = Dtype::f32;  // before any cast
  std::vector<Box> boxes;
  std::vector<Decoding> decodings;

  // A view of it, for a reader of its decodings.
  [[nodiscard]] Value as_value(std::string_view name, Dtype as) const noexcept {
    return {.name = name, .shape = &shape, .dtype = as, .boxes = boxes};
  }
};
[[nodiscard]] TensorRecipe tensor_recipe(const Catalog& catalog, std::uint32_t tensor,
                                         std::optional<Dtype> wanted = std::nullopt);

// Returns true for FP8 that no codec knows as codes or as a companion: its codes are numbers.
[[nodiscard]] bool is_plain_fp8(const Catalog& catalog, std::uint32_t tensor);

// The numbers of a tensor whose bytes are codes or blocks, as a whole source that the view calls
// `number`; and what gives them.
[[nodiscard]] View numbers_view(const Catalog& catalog, std::uint32_t tensor, std::uint32_t number);
[[nodiscard]] Decoding numbers_decoding(const Catalog& catalog, std::uint32_t tensor, Dtype dtype);

// The roots of the checkpoints behind the first that a recipe reads, in their order.
[[nodiscard]] std::vector<std::string> merged_roots(const Catalog& catalog,
                                                    std::span<const Decoding> decodings,
                                                    const Recipe& recipe);

}  // namespace loadstone
