// Names and metadata that llama.cpp needs in the GGUF file of a language model.
#pragma once

#include <string>
#include <vector>

#include "loadstone/catalog.h"

namespace loadstone {

// Advice for a file that llama.cpp should read.
inline constexpr const char* own_converter =
    "for llama.cpp, use its own converter: `python -m loadstone convert --converter` (converter= "
    "in Python)";

// Returns true if at least one tensor has a name that llama.cpp uses: "blk.0.attn_q.weight".
[[nodiscard]] bool has_llama_cpp_names(const Catalog& catalog);

// Returns the keys without which llama.cpp loads no model with a token embedding.
[[nodiscard]] std::vector<std::string> missing_tokenizer_keys(const Metadata& metadata);

// Describes what a mix of types lacks first, with the next step, for a model that is neither an
// image model nor a language model with a number of layers.
[[nodiscard]] std::string lacking_for_mix(const Catalog& catalog, const Metadata& metadata);

}  // namespace loadstone
