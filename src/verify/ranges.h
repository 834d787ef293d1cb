// The bytes of a catalog's tensors, each once: views that torch saved may overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "loadstone/catalog.h"
#include "verify/values.h"

namespace loadstone {

// Bytes of a shard that belong to the same tensors all of them.
struct DistinctRange {
  std::uint32_t tensor = 0;  // one of them, for errors
  std::uint64_t begin = 0;   // from the tensor's first byte on
  std::uint64_t end = 0;
};

// Tensors of different encodings over the same bytes are read once for each encoding. Thread-safe.
class DistinctRanges {
 public:
  // The catalog must live as long.
  explicit DistinctRanges(const Catalog& catalog);

  [[nodiscard]] std::span<const DistinctRange> ranges() const noexcept { return ranges_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }
  // One for each tensor, from one for each range.
  [[nodiscard]] std::vector<ValueCounts> of_tensors(std::span<const ValueCounts> counts) const;

 private:
  struct Span {
    std::size_t begin = 0;  // in ranges_
    std::size_t end = 0;
  };

  void add_group(std::span<const std::uint32_t> tensors);

  const Catalog& catalog_;
  std::vector<DistinctRange> ranges_;
  std::vector<Span> spans_;  // of each tensor
  std::uint64_t bytes_ = 0;
};

}  // namespace loadstone
