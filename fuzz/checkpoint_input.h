// Checkpoints of every format, as a fuzzer's decisions describe them.
#pragma once

#include <string>

#include "fuzz/input.h"
#include "support/memory_storage.h"

namespace loadstone::fuzz {

// Adds files below /m and returns the path to open. Some are as they should be; others have changed
// bytes, or are the input's own ones.
[[nodiscard]] std::string add_checkpoint(Input& input, test::MemoryStorage& storage);

// `count` bytes: zeros, any, or such that they are moderate numbers in most dtypes.
[[nodiscard]] std::string values(Input& input, std::size_t count);

// Names that models and quantized files have.
[[nodiscard]] std::string tensor_name(Input& input);

}  // namespace loadstone::fuzz
