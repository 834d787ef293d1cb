// Chooses the types of a language model's tensors in a quantized GGUF file by llama.cpp's rules,
// which apply to llama.cpp's tensor names. See docs/convert-gguf.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/convert.h"
#include "loadstone/dtype.h"
#include "loadstone/shape.h"

namespace loadstone {

// A mix, which llama.cpp calls a file type: one type for most tensors, other types for important
// ones.
struct Mix {
  std::string_view name;    // "q4_k_m"
  std::uint32_t file_type;  // value of general.file_type
  Encoding type;            // type of most tensors
};
[[nodiscard]] std::span<const Mix> mixes() noexcept;
// Returns null for an unknown name; ignores case.
[[nodiscard]] const Mix* find_mix(std::string_view name);

// Properties of a model, besides its tensors, that the rules test.
struct MixModel {
  std::string architecture;
  std::uint64_t layers = 0;
  std::uint64_t experts = 0;
  std::uint64_t heads = 0;     // number of the first layer's attention heads
  std::uint64_t kv_heads = 0;  // number of the first layer's key and value heads
};
// Reads GGUF metadata; nullopt without a number of layers, as only language models have one.
[[nodiscard]] std::optional<MixModel> mix_model(const Metadata& metadata);

struct MixTensor {
  std::string_view name;
  const Shape* shape;
  std::optional<Encoding> asked;  // type that the caller requested, which overrides the rules
};

// Returns true if llama.cpp quantizes the tensor at all.
[[nodiscard]] bool is_mixed(std::string_view name, const Shape& shape,
                            std::string_view architecture) noexcept;

// Returns the type of each tensor. Each tensor must satisfy is_mixed(). A tensor whose rows are not
// whole blocks of its type gets a fallback: see fitting_type().
[[nodiscard]] std::vector<Encoding> mixed_types(const Mix& mix, const MixModel& model,
                                                bool has_importance,
                                                std::span<const MixTensor> tensors);

// Returns true if a mix has rules for tensors of this name: one that llama.cpp uses.
[[nodiscard]] bool is_in_mixes(std::string_view name) noexcept;
// Returns true if llama.cpp rejects blocks of this type without an importance matrix. It rejects
// the types with the fewest bits, except for the token embedding and the output head.
[[nodiscard]] bool mix_needs_importance(const Mix* mix, std::string_view name,
                                        BlockFormat type) noexcept;
// Returns true for a tensor whose rows are looked up by token: llama-imatrix measures no importance
// for it.
[[nodiscard]] bool is_token_embedding(std::string_view name) noexcept;

// Returns the type or, if the rows are not whole blocks of the type, llama.cpp's substitute: a type
// with smaller blocks, or F16.
[[nodiscard]] Encoding fitting_type(Encoding type, const Shape& shape) noexcept;

}  // namespace loadstone
