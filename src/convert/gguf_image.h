// Models of images and video in GGUF files, which keep the names of the checkpoint: which model it
// is, which tensors are quantized, and mixes of types. As ComfyUI-GGUF has them, as data.
// docs/convert.md
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "convert/gguf_mix.h"
#include "loadstone/catalog.h"
#include "loadstone/recipe.h"

namespace loadstone {

struct ImageModel;

// Null: no such model is known.
[[nodiscard]] const ImageModel* find_image_model(std::string_view architecture) noexcept;
// The model that metadata name; null where it is another or none.
[[nodiscard]] const ImageModel* image_model(const Metadata& metadata);
// The model whose tensors these are, by the names of its own checkpoint.
[[nodiscard]] const ImageModel* recognised_image_model(const Catalog& catalog);
// Whether the names are those of diffusers for one of these models, which ComfyUI-GGUF does
// not read.
[[nodiscard]] bool has_unfused_names(const Catalog& catalog);

// "wan", for general.architecture.
[[nodiscard]] std::string_view architecture(const ImageModel& model) noexcept;

// Whether the tensor becomes blocks: a matrix that is no part of the embeddings or the output.
[[nodiscard]] bool is_image_mixed(const ImageModel& model, std::string_view name,
                                  const Shape& shape) noexcept;
// Whether it is F32 in a quantized file: vectors, small ones, and what the model adds as it is.
[[nodiscard]] bool is_wide(const ImageModel& model, std::string_view name,
                           const Shape& shape) noexcept;

// The type of each tensor, all of which are mixed; see mixed_types().
[[nodiscard]] std::vector<Encoding> image_types(Mix mix, std::span<const MixTensor> tensors);

}  // namespace loadstone
