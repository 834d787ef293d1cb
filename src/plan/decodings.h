// What boxes copy from: a tensor of the checkpoint, or what a kernel makes of some.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "boxes/view.h"
#include "loadstone/catalog.h"
#include "loadstone/recipe.h"

namespace loadstone {

// What the box's elements are on the way. Source and decoding must be there.
[[nodiscard]] Encoding encoding_of(const Box& box, const std::vector<TensorInfo>& tensors,
                                   std::span<const Decoding> decodings) noexcept;

// All tensors that the boxes need, each once, in the order of the boxes. Those that are not there
// are left out. `merge`: of boxes that have more terms; null where they have none.
[[nodiscard]] std::vector<std::uint32_t> sources_of(const std::vector<Box>& boxes,
                                                    std::span<const Decoding> decodings,
                                                    const std::shared_ptr<const Merge>& merge = {});

// All of one tensor, decoded where its bytes are codes or blocks: to F32, or to BF16 or F16 where
// that is `wanted`.
struct TensorRecipe {
  Shape shape;
  Dtype dtype = Dtype::f32;  // before any cast
  std::vector<Box> boxes;
  std::vector<Decoding> decodings;
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
