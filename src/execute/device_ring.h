// Bytes on their way to devices: pinned memory in slots, filled by threads and copied from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

#include "execute/memory_count.h"
#include "loadstone/device.h"
#include "loadstone/plan.h"
#include "plan/budget.h"

namespace loadstone {

// A slot is filled by one thread, copied from while others are filled, and free again when its
// copies have arrived. Small values share one. Each slot is a lane of the device. Thread-safe.
class DeviceRing {
 public:
  // Allocates as much as the budget says, for copies to `first` and other devices. All must live as
  // long.
  DeviceRing(const Plan& plan, Device& device, std::string_view first, const Ring& ring,
             MemoryCount& memory);
  DeviceRing(const DeviceRing&) = delete;
  DeviceRing& operator=(const DeviceRing&) = delete;
  // Waits for copies that are under way.
  ~DeviceRing();

  // Memory for so many bytes, at most those of a slot: the calling thread fills it and sends it.
  // Waits for the slot that was sent first where none is free.
  [[nodiscard]] std::byte* take(std::uint64_t bytes);
  // Begins to copy to the memory of a target's device: bytes that were taken, or any others. Throws
  // Error that names target and device.
  void send(std::uint32_t target, std::byte* to, std::span<const std::byte> bytes);
  // Returns when all has arrived.
  void finish();

 private:
  struct Slot {
    std::uint64_t used_bytes = 0;
    std::uint32_t target = 0;  // that was sent last
  };

  [[nodiscard]] unsigned next_slot(std::uint64_t bytes);
  void send_taken(unsigned slot, std::uint32_t target, std::byte* to,
                  std::span<const std::byte> bytes);
  void wait(unsigned slot);
  template <typename Call>
  void name_errors(std::uint32_t target, const Call& call) const;
  [[nodiscard]] bool holds(const std::byte* bytes) const noexcept;

  const Plan& plan_;
  Device& device_;
  const Ring ring_;
  MemoryCount& memory_;
  std::byte* const data_;
  std::mutex mutex_;
  std::vector<Slot> slots_;     // guarded by mutex_, as all that follows
  std::vector<unsigned> free_;  // nothing is under way
  std::vector<unsigned> open_;  // copied from, with room left
  std::deque<unsigned> sent_;   // full, the first one first
};

}  // namespace loadstone
