// Types of the tensors of image and video models, which keep the checkpoint's names: the rules of
// ComfyUI-GGUF.
#pragma once

#include <array>
#include <span>
#include <string_view>
#include <vector>

#include "convert/choose/gguf_mix.h"
#include "loadstone/catalog.h"
#include "loadstone/shape.h"

namespace loadstone {

// Texts are space-separated lists.
struct ImageModel {
  std::string_view architecture;          // "wan"
  std::array<std::string_view, 3> marks;  // all tensors of one of these identify the model
  std::string_view plain;                 // parts of names that are never quantized
  std::string_view wide;                  // parts of names that stay F32
};

// Returns null for an unknown model.
[[nodiscard]] const ImageModel* find_image_model(std::string_view architecture) noexcept;
// Returns the model that the metadata name; null if it is unknown or absent.
[[nodiscard]] const ImageModel* image_model(const Metadata& metadata);
// Returns the model by the tensor names of its original checkpoint.
[[nodiscard]] const ImageModel* recognised_image_model(const Catalog& catalog);
// Returns true if diffusers' names are used for one of these models; ComfyUI-GGUF does not read
// them.
[[nodiscard]] bool has_unfused_names(const Catalog& catalog);

// Returns true if the tensor becomes blocks: a matrix outside of embeddings and output.
[[nodiscard]] bool is_image_mixed(const ImageModel& model, std::string_view name,
                                  const Shape& shape) noexcept;
// Returns true if it is F32 in a quantized file: vectors, small tensors, and tensors that the model
// adds directly.
[[nodiscard]] bool is_wide(const ImageModel& model, std::string_view name,
                           const Shape& shape) noexcept;

// Returns the type of each tensor, all of which must be mixed; see mixed_types().
[[nodiscard]] std::vector<Encoding> image_types(const Mix& mix, std::span<const MixTensor> tensors);

}  // namespace loadstone
