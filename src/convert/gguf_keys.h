// The types of GGUF metadata: those that the format fixes, and those that text forgets.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "loadstone/catalog.h"

namespace loadstone {

// Throws Error "plan.options" for an entry that a caller gives to such a key with another type:
// ggml would refuse the file, or take the key for missing.
void check_key_types(const Metadata& given);

// Text has no types, so safetensors metadata keeps those of numbers and bools under this key:
// "llama.block_count=u32 llama.use_parallel_residual=bool".
inline constexpr const char* types_key = "loadstone.gguf_types";
// Return that text for the entries of `source` in `texts`; empty if all of these are text.
[[nodiscard]] std::string types_text(const Metadata& source, const Metadata& texts);
// Gives texts of a safetensors file the types of `types_key` and of the format. Returns the keys
// of texts that do not fit their types and stay text.
[[nodiscard]] std::vector<std::string> restore_types(std::string_view types, Metadata& metadata);

}  // namespace loadstone
