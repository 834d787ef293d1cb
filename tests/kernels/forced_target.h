// Declares a guard that forces the kernels of one instruction set.
#pragma once

#include <hwy/highway.h>

#include <cstdint>

namespace loadstone {

// Enables all instruction sets again on destruction.
class ForcedTarget {
 public:
  explicit ForcedTarget(std::int64_t target) { force(target); }
  ~ForcedTarget() { force(0); }
  ForcedTarget(const ForcedTarget&) = delete;
  ForcedTarget& operator=(const ForcedTarget&) = delete;

 private:
  static void force(std::int64_t sets) {
    hwy::SetSupportedTargetsForTest(sets);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

}  // namespace loadstone
