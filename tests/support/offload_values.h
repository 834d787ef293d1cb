// Reads an offload folder as accelerate does: through its index alone.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "support/plan_builder.h"

namespace loadstone::testing {

// Returns each value that a run wrote, under all its names; omits values that stay in a shard of
// the source. Empty without an index. Throws if a file in the index is missing.
[[nodiscard]] std::map<std::string, Bytes> offload_values(const std::filesystem::path& folder);

}  // namespace loadstone::testing
