// Memory for bytes under way: bounded for all threads together, and counted.
#pragma once

#include <atomic>
#include <cstdint>

#include "execute/anonymous_memory.h"

namespace loadstone {

// Hands a slot of fixed size to each reader that asks for one. Thread-safe.
class StagingRing {
 public:
  explicit StagingRing(std::uint64_t slot_bytes) : slot_bytes_(slot_bytes) {}

  // Throws Error "memory.host".
  [[nodiscard]] AnonymousMemory take_slot() {
    AnonymousMemory slot(slot_bytes_);
    // Slots live until the readers end, so the sum is the peak.
    bytes_peak_.fetch_add(slot_bytes_, std::memory_order_relaxed);
    return slot;
  }
  [[nodiscard]] std::uint64_t bytes_peak() const noexcept {
    return bytes_peak_.load(std::memory_order_relaxed);
  }

 private:
  std::uint64_t slot_bytes_;
  std::atomic<std::uint64_t> bytes_peak_ = 0;
};

}  // namespace loadstone
