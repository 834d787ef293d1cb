// Reads an offload folder as accelerate does: by its index alone.
#pragma once

#include <filesystem>
#include <map>
#include <string>

#include "support/plan_builder.h"

namespace loadstone::testing {

// Each value that a run wrote, under all its names; what stays in a shard of the source is left
// out. Empty without an index. Throws where the index names what is not there.
[[nodiscard]] std::map<std::string, Bytes> offload_values(const std::filesystem::path& folder);

}  // namespace loadstone::testing
