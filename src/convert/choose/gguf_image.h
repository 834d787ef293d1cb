// Types of the tensors of models of images and video, which keep the names of the checkpoint: as
// ComfyUI-GGUF has them.
#pragma once

#include <array>
#include <span>
#include <string_view>
#include <vector>

#include "convert/choose/gguf_mix.h"
#include "loadstone/catalog.h"
#include "loadstone/shape.h"

namespace loadstone {

// Texts are lists of words.
struct ImageModel {
  std::string_view architecture;          // "wan"
  std::array<std::string_view, 3> marks;  // all tensors of one of these identify the model
  std::string_view plain;                 // parts of names that are never quantized
  std::string_view wide;                  // parts of names that stay F32
};

// Null: no such model is known.
[[nodiscard]] const ImageModel* find_image_model(std::string_view architecture) noexcept;
// The model that metadata name; null where it is another or none.
[[nodiscard]] const ImageModel* image_model(const Metadata& metadata);
// The model whose tensors these are, by the names of its own checkpoint.
[[nodiscard]] const ImageModel* recognised_image_model(const Catalog& catalog);
// Whether the names are those of diffusers for one of these models, which ComfyUI-GGUF does
// not read.
[[nodiscard]] bool has_unfused_names(const Catalog& catalog);

// Returns true if the tensor becomes blocks: a matrix outside the embeddings and the output.
[[nodiscard]] bool is_image_mixed(const ImageModel& model, std::string_view name,
                                  const Shape& shape) noexcept;
// Returns true if it is F32 in a quantized file: vectors, small ones, and what the model adds as it
// is.
[[nodiscard]] bool is_wide(const ImageModel& model, std::string_view name,
                           const Shape& shape) noexcept;

// The type of each tensor, all of which are mixed; see mixed_types().
[[nodiscard]] std::vector<Encoding> image_types(const Mix& mix, std::span<const MixTensor> tensors);

}  // namespace loadstone
