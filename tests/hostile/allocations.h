// Counts what is allocated through operator new, in this whole binary.
#pragma once

#include <cstddef>

namespace loadstone::test {

// The highest sum of memory in use since reset(), above what was in use then.
// Thread-safe but for reset().
class AllocationPeak {
 public:
  static void reset() noexcept;
  [[nodiscard]] static std::size_t bytes() noexcept;
};

}  // namespace loadstone::test
