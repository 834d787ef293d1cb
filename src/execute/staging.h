// Memory for bytes under way: bounded for all threads together, and counted.
#pragma once

#include <algorithm>
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
    slots_.fetch_add(1, std::memory_order_relaxed);
    return slot;
  }
  // A reader is about to bring so many bytes into its slot.
  void count(std::uint64_t bytes) noexcept { bytes_.fetch_add(bytes, std::memory_order_relaxed); }

  // A slot is no memory until it is written to, and lives until its reader ends: what was used is
  // all that was brought, or else whole slots.
  [[nodiscard]] std::uint64_t bytes_peak() const noexcept {
    return std::min(bytes_.load(std::memory_order_relaxed),
                    slots_.load(std::memory_order_relaxed) * slot_bytes_);
  }

 private:
  std::uint64_t slot_bytes_;
  std::atomic<std::uint64_t> slots_ = 0;
  std::atomic<std::uint64_t> bytes_ = 0;
};

}  // namespace loadstone
