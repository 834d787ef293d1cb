// Counts the memory that the whole binary allocates through operator new.
#pragma once

#include <cstddef>

namespace loadstone::test {

// Measures the peak of memory in use since reset(), relative to the memory in use at reset().
// Thread-safe except for reset().
class AllocationPeak {
 public:
  static void reset() noexcept;
  [[nodiscard]] static std::size_t bytes() noexcept;
};

}  // namespace loadstone::test
