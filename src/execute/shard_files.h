// The files that are read from, and whether they still are what the headers said.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "loadstone/catalog.h"
#include "loadstone/plan.h"
#include "loadstone/storage.h"

namespace loadstone {

// Throws Error "io.changed" where size, times, inode or device are others than when the catalog was
// made.
void check_identity(const Shard& shard, const ByteSource& source);

// Those of the catalog's shards that are needed, opened and with their header's digest compared;
// null in the place of the others. Throws Error "io.changed", and what opening throws.
[[nodiscard]] std::vector<std::shared_ptr<ByteSource>> open_shards(const Catalog& catalog,
                                                                   const std::vector<bool>& needed,
                                                                   Storage& storage);

// The shard of the target's first source, and where in it that stands: work in this order reads
// files from front to back.
[[nodiscard]] std::pair<std::uint32_t, std::uint64_t> first_place(const Plan& plan,
                                                                  const PlannedTarget& target);

}  // namespace loadstone
