// How many bytes of the files are read, each once however many values need it.
#pragma once

#include <cstdint>

namespace loadstone {

// Where a value's bytes stand in a shard; fewer than from begin to end where holes are passed over.
struct CountedBytes {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t bytes = 0;
  std::uint32_t shard = 0;

  friend bool operator==(const CountedBytes&, const CountedBytes&) = default;
};

// Exact for what has no holes and for what lies apart. Of what lies in holes of another value is
// not known how much both have: all of both counts, but no more than from the first byte to the
// last. Value type.
class ReadCount {
 public:
  // They come sorted, by shard and then by begin.
  void add(const CountedBytes& next) noexcept;
  [[nodiscard]] std::uint64_t total() const noexcept;

 private:
  [[nodiscard]] std::uint64_t new_bytes(const CountedBytes& next) const noexcept;

  CountedBytes last_;
  CountedBytes joint_;       // all that lie in each other and were the last ones
  bool has_holes_ = false;   // the one of them that ends last
  std::uint64_t total_ = 0;  // without these
};

}  // namespace loadstone
