// Where in the shards a target's value comes from.
#pragma once

#include <cstdint>
#include <vector>

#include "boxes/value.h"

namespace loadstone {

// Bytes of a shard that hold a part of one source.
struct SourceExtent {
  std::uint32_t source = 0;
  std::uint64_t begin = 0;  // in the shard
  std::uint64_t end = 0;
};

// What the target's value comes from, one extent a source, in the order in which they are met.
[[nodiscard]] std::vector<SourceExtent> source_extents(const ValueSet& values, const Value& target);

}  // namespace loadstone
