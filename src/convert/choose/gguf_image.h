// Chooses the types of the tensors of image and video models by the rules of ComfyUI-GGUF. The
// tensors keep the names of the checkpoint.
#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "convert/choose/gguf_mix.h"
#include "loadstone/catalog.h"
#include "loadstone/shape.h"

namespace loadstone {

// All strings except `architecture` are space-separated lists.
struct ImageModel {
  std::string_view architecture;  // "wan"
  // Lists of tensor names. A checkpoint with all names of one list is this model.
  std::array<std::string_view, 3> marks;
  std::string_view plain;  // parts of names that are never quantized
  std::string_view wide;   // parts of names that stay F32
};

// Returns null for an unknown model.
[[nodiscard]] const ImageModel* find_image_model(std::string_view architecture) noexcept;
[[nodiscard]] std::vector<std::string> image_architectures();
// Returns the model that the metadata's architecture names; null if it is unknown or absent.
[[nodiscard]] const ImageModel* image_model(const Metadata& metadata);
// Recognises the model by the tensor names of its original checkpoint; null if it is unknown.
[[nodiscard]] const ImageModel* recognised_image_model(const Catalog& catalog);
// Returns true if the tensors of one of these models have diffusers' names, because ComfyUI-GGUF
// does not read such tensors.
[[nodiscard]] bool has_unfused_names(const Catalog& catalog);

// Returns true if the tensor becomes blocks: a matrix that is not an embedding or an output layer.
[[nodiscard]] bool is_image_mixed(const ImageModel& model, std::string_view name,
                                  const Shape& shape) noexcept;
// Returns true if the tensor stays F32 in a quantized file: vectors, small tensors, tensors that
// the model adds directly, and convolutions, whose BF16 weights diffusers cannot use.
[[nodiscard]] bool is_wide(const ImageModel& model, std::string_view name,
                           const Shape& shape) noexcept;

// Returns the type of each tensor; see mixed_types(). Each tensor must satisfy is_image_mixed().
[[nodiscard]] std::vector<Encoding> image_types(const Mix& mix, std::span<const MixTensor> tensors);

}  // namespace loadstone
