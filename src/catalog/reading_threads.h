#pragma once

#include "loadstone/catalog.h"

namespace loadstone {

// As many threads as the caller wants; 0: as many as the shards want reads under way at once, else
// one per core, at most `most`.
[[nodiscard]] unsigned reading_threads(const Catalog& catalog, unsigned wanted,
                                       unsigned most) noexcept;

}  // namespace loadstone
