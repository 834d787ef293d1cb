// Which tensor of a language model gets which type when a GGUF file is quantized: llama.cpp's
// rules, for tensors under llama.cpp's names, as data. docs/convert.md
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

// A mix, which llama.cpp calls a file type: one type for most tensors, others for those that need
// more.
struct Mix {
  std::string_view name;    // "q4_k_m"
  std::uint32_t file_type;  // the number that general.file_type gets
  Encoding type;            // of most tensors
};
[[nodiscard]] std::span<const Mix> mixes() noexcept;
// Null where no mix has the name, whatever its case.
[[nodiscard]] const Mix* find_mix(std::string_view name);

// The facts about a model, besides its tensors, that the rules ask for.
struct MixModel {
  std::string architecture;
  std::uint64_t layers = 0;
  std::uint64_t experts = 0;
  std::uint64_t heads = 0;     // of the first layer
  std::uint64_t kv_heads = 0;  // the same
};
// From metadata of GGUF; nothing where it is of no language model: the number of layers is missing.
[[nodiscard]] std::optional<MixModel> mix_model(const Metadata& metadata);

struct MixTensor {
  std::string_view name;
  const Shape* shape;
  std::optional<Encoding> asked;  // by the caller, in place of the rules
};

// Whether llama.cpp quantizes the tensor at all.
[[nodiscard]] bool is_mixed(std::string_view name, const Shape& shape,
                            std::string_view architecture) noexcept;

// The type of each tensor, all of which are mixed. Rows that are no whole blocks of the type get
// one that they fit: see fitting_type().
[[nodiscard]] std::vector<Encoding> mixed_types(const Mix& mix, const MixModel& model,
                                                bool has_importance,
                                                std::span<const MixTensor> tensors);

// Whether llama.cpp refuses to make such blocks of the tensor without an importance: those of the
// fewest bits, but for the two tensors that are looked up or come last.
[[nodiscard]] bool mix_needs_importance(const Mix* mix, std::string_view name,
                                        BlockFormat type) noexcept;
// Whether the tensor is looked up by tokens: no importance is measured of it.
[[nodiscard]] bool is_token_embedding(std::string_view name) noexcept;

// The type, or where rows are no whole blocks of it the one that llama.cpp takes in its place: of
// smaller blocks, or F16.
[[nodiscard]] Encoding fitting_type(Encoding type, const Shape& shape) noexcept;

}  // namespace loadstone
