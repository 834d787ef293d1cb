// Copies bytes to devices through slots of pinned memory, which threads fill.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "boxes/value.h"
#include "engine/limits.h"
#include "engine/memory_count.h"
#include "loadstone/device.h"
#include "loadstone/error.h"

namespace loadstone {

// A ring of slots. One thread at a time fills a slot, while other slots are being copied to the
// device. A slot is free again when its copies are complete. Small values share a slot, and their
// copies begin together: when a batch is large enough, when the slot is needed, or in finish().
// Each slot is a lane of the device. Thread-safe.
class DeviceRing {
 public:
  // Allocates the ring of the budget, for copies to `first` and to other devices. The arguments
  // must outlive the ring.
  DeviceRing(const ValueSet& values, Device& device, std::string_view first, const Ring& ring,
             MemoryCount& memory);
  DeviceRing(const DeviceRing&) = delete;
  DeviceRing& operator=(const DeviceRing&) = delete;
  // Waits for copies in flight.
  ~DeviceRing();

  // Returns memory for this many bytes, at most a slot. The calling thread fills the memory and
  // passes it to send(). Waits for the oldest slot if no slot is free.
  [[nodiscard]] std::byte* take(std::uint64_t bytes);
  // Copies bytes to `to` in the memory of the value's device, now or later. `bytes` may come from
  // take() or from any other memory, which the caller may reuse after the call. Throws Error that
  // names the value and the device.
  void send(std::uint32_t value, std::byte* to, std::span<const std::byte> bytes);
  // Returns when all copies are complete.
  void finish();

 private:
  struct Slot {
    std::uint64_t used_bytes = 0;
    std::uint64_t age = 0;    // the slot in use with the smallest age was taken first
    std::uint32_t value = 0;  // the value sent last
    // Copies that have not begun, and the value of each copy.
    std::vector<DeviceCopy> copies;
    std::vector<std::uint32_t> values;
    std::uint64_t unsent_bytes = 0;
  };

  [[nodiscard]] bool has_room(unsigned slot, std::uint64_t bytes) const noexcept {
    return ring_.slot_bytes - slots_[slot].used_bytes >= bytes;
  }
  [[nodiscard]] unsigned next_slot(std::uint64_t bytes);
  void send_taken(unsigned slot, std::uint32_t value, std::byte* to,
                  std::span<const std::byte> bytes);
  void begin_copies(unsigned slot);
  void begin_batch(unsigned slot, std::size_t first, std::size_t count);
  void wait(unsigned slot);
  [[nodiscard]] Error named(const Error& error, std::uint32_t value, std::string message) const;
  [[nodiscard]] std::string_view device_of(std::uint32_t value) const noexcept {
    return values_[value].device;
  }
  [[nodiscard]] bool holds(const std::byte* bytes) const noexcept;

  const ValueSet& values_;
  Device& device_;
  const Ring ring_;
  MemoryCount& memory_;
  std::mutex mutex_;
  // A slot that is neither in free_ nor in used_ belongs to one thread, which needs no lock for it.
  // mutex_ guards the slots in the lists and all other members.
  std::vector<Slot> slots_;
  std::vector<unsigned> free_;  // slots without copies in flight
  std::vector<unsigned> used_;
  std::uint64_t taken_ = 0;  // number of times that an empty slot was taken
  std::byte* const data_;    // pinned last, so that no later failure can leave it pinned
};

}  // namespace loadstone
