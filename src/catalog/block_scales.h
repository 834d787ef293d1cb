// Scales next to blocks of GGUF.
#pragma once

#include <cstdint>
#include <vector>

#include "loadstone/catalog.h"

namespace loadstone {

// Returns all that belongs to blocks of the first checkpoint: their numbers are multiplied with it.
// `kept`: blocks that stay as they are, by tensor, and keep theirs; empty: none.
[[nodiscard]] std::vector<std::uint32_t> companions_of_blocks(const Catalog& catalog,
                                                              const std::vector<bool>& kept = {});

}  // namespace loadstone
