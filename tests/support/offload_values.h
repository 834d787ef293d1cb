// Reads an offload folder as accelerate does, using only its index.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "support/plan_builder.h"

namespace loadstone::testing {

// Returns each value that the load wrote, under all its names, without values that stay in a shard
// of the checkpoint. The result is empty without an index. Throws if a file in the index is
// missing.
[[nodiscard]] std::map<std::string, Bytes> offload_values(const std::filesystem::path& folder);

}  // namespace loadstone::testing
