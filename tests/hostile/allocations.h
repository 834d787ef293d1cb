// Counts allocations through operator new in this whole binary.
#pragma once

#include <cstddef>

namespace loadstone::test {

// Peak of memory in use since reset(), above the level at reset(). Thread-safe except for reset().
class AllocationPeak {
 public:
  static void reset() noexcept;
  [[nodiscard]] static std::size_t bytes() noexcept;
};

}  // namespace loadstone::test
