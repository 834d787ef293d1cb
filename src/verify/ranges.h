// Divides the bytes of a catalog's tensors into ranges that do not overlap. Views that torch saved
// may overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "loadstone/catalog.h"
#include "verify/values.h"

namespace loadstone {

// A range of a shard whose bytes all belong to the same tensors.
struct DistinctRange {
  std::uint32_t tensor = 0;  // one of the tensors, for error messages
  std::uint64_t begin = 0;   // relative to the tensor's first byte
  std::uint64_t end = 0;
};

// Ranges of all tensors. If tensors of different encodings share bytes, these are read once per
// encoding. Thread-safe.
class DistinctRanges {
 public:
  // The catalog must outlive the object.
  explicit DistinctRanges(const Catalog& catalog);

  [[nodiscard]] std::span<const DistinctRange> ranges() const noexcept { return ranges_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  // Returns the counts of each tensor, computed from the counts of each range.
  [[nodiscard]] std::vector<ValueCounts> of_tensors(std::span<const ValueCounts> counts) const;

 private:
  struct Span {
    std::size_t begin = 0;  // in ranges_
    std::size_t end = 0;
  };

  void add_group(std::span<const std::uint32_t> tensors);

  const Catalog& catalog_;
  std::vector<DistinctRange> ranges_;
  std::vector<Span> spans_;  // ranges of each tensor
  std::uint64_t bytes_ = 0;
};

}  // namespace loadstone
