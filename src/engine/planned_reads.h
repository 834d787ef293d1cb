// Which bytes of the shards a run reads, before it reads them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "boxes/value.h"
#include "loadstone/byte_range.h"

namespace loadstone {

// The bytes that these targets are made of, in the order of the files, as ranges that do not meet.
// Bytes that no target needs are among them only where they are read over. Short pieces that lie
// far apart, as those of columns do, are left out: asking for each costs as much as reading it.
[[nodiscard]] std::vector<ShardRange> planned_reads(const ValueSet& values,
                                                    std::span<const std::uint32_t> targets);

}  // namespace loadstone
