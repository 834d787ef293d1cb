// Builds checkpoints of every format from a fuzzer's decisions.
#pragma once

#include <string>

#include "fuzz/input.h"
#include "support/memory_storage.h"

namespace loadstone::fuzz {

// Adds files below /m and returns the path to open. Some files are valid; others have changed
// bytes, or consist of the input's bytes.
[[nodiscard]] std::string add_checkpoint(Input& input, test::MemoryStorage& storage);

// Returns `count` bytes: zeros, arbitrary bytes, or bytes that are moderate values in most dtypes.
[[nodiscard]] std::string values(Input& input, std::size_t count);

// Returns a name that models and quantized files use.
[[nodiscard]] std::string tensor_name(Input& input);

}  // namespace loadstone::fuzz
