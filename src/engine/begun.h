// A note of the destinations that a load has begun to write.
#pragma once

#include <atomic>
#include <cstdint>

namespace loadstone {

// Notes that a target's destination is about to be written. Thread-safe.
//
// `begun`: see ExecuteOptions::begun.
inline void note_begun(std::uint8_t* begun, std::uint32_t target) noexcept {
  if (begun == nullptr) return;
  std::atomic_ref(begun[target]).store(1, std::memory_order_relaxed);
}

}  // namespace loadstone
