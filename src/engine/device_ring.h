// Bytes on their way to devices: pinned memory in slots, filled by threads and copied from.
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

// A slot is filled by one thread at a time, copied from while others are filled, and free again
// when its copies have arrived. Small values share one: their copies begin together, once they are
// worth a call, the slot is needed, or all is sent. Each slot is a lane of the device. Thread-safe.
class DeviceRing {
 public:
  // Allocates the ring of the budget, for copies to `first` and other devices. The arguments must
  // outlive it.
  DeviceRing(const ValueSet& values, Device& device, std::string_view first, const Ring& ring,
             MemoryCount& memory);
  DeviceRing(const DeviceRing&) = delete;
  DeviceRing& operator=(const DeviceRing&) = delete;
  // Waits for copies in flight.
  ~DeviceRing();

  // Returns memory for this many bytes, at most a slot: the calling thread fills and sends it.
  // Waits for the oldest slot if none is free.
  [[nodiscard]] std::byte* take(std::uint64_t bytes);
  // Copies to the memory of a value's device, now or later: bytes that were taken, or any others,
  // which are the caller's again. Throws Error that names value and device.
  void send(std::uint32_t value, std::byte* to, std::span<const std::byte> bytes);
  // Returns when all has arrived.
  void finish();

 private:
  struct Slot {
    std::uint64_t used_bytes = 0;
    std::uint64_t age = 0;    // of slots in use, the least was taken first
    std::uint32_t value = 0;  // that was sent last
    // Copies that have not begun, and the value of each.
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
  // A slot in neither list is its thread's, which takes no lock; all else is guarded by mutex_.
  std::vector<Slot> slots_;
  std::vector<unsigned> free_;  // without copies in flight
  std::vector<unsigned> used_;
  std::uint64_t taken_ = 0;  // slots, each time that one was empty
  std::byte* const data_;    // pinned last: nothing fails afterwards
};

}  // namespace loadstone
