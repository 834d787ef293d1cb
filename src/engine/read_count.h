// Counts the bytes of shards that are read.
#pragma once

#include <compare>
#include <cstdint>
#include <vector>

namespace loadstone {

// Bytes of a shard that a value needs. Fewer than the range if the read skips holes.
struct CountedBytes {
  std::uint32_t shard = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t bytes = 0;

  friend auto operator<=>(const CountedBytes&, const CountedBytes&) = default;
};

// Counts the bytes that are read, each byte once even if several values need it. The count is exact
// for ranges without holes, and for ranges that do not overlap. If a range overlaps the holes of
// another range, both ranges count in full, up to the distance between their first and last byte.
// Value type.
class ReadCount {
 public:
  // Call in the order of shard and begin.
  void add(const CountedBytes& next) noexcept;
  [[nodiscard]] std::uint64_t total() const noexcept;

 private:
  [[nodiscard]] std::uint64_t new_bytes(const CountedBytes& next) const noexcept;

  CountedBytes last_;
  CountedBytes joint_;       // the current run of overlapping ranges
  bool has_holes_ = false;   // true if the range in joint_ that ends last has holes
  std::uint64_t total_ = 0;  // the ranges before joint_
};

// Returns the total of the ranges, which may be in any order.
[[nodiscard]] std::uint64_t counted_once(std::vector<CountedBytes> ranges);

}  // namespace loadstone
