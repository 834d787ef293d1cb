// A range of bytes in a file or in memory.
#pragma once

#include <compare>
#include <cstdint>

namespace loadstone {

struct ByteRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  [[nodiscard]] std::uint64_t size() const noexcept { return end - begin; }
  friend auto operator<=>(const ByteRange&, const ByteRange&) = default;
};

// A range in one shard of a catalog.
struct ShardRange {
  std::uint32_t shard = 0;
  ByteRange bytes;

  friend bool operator==(const ShardRange&, const ShardRange&) = default;
};

}  // namespace loadstone
