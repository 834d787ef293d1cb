// Memory for bytes in flight: a plan promises it, and the engine sizes itself by it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace loadstone {

// Address space that a thread stages bytes in, and how much of it is ever written to: the rest is
// no memory.
struct Slot {
  std::uint64_t bytes = 0;
  std::uint64_t used_bytes = 0;
};

// Memory that bytes are copied from to a device, of all threads together: two slots for each, so
// that one is filled while another is copied. A slot holds a window, or several small values.
struct Ring {
  unsigned slots = 0;
  std::uint64_t slot_bytes = 0;

  [[nodiscard]] std::uint64_t bytes() const noexcept { return slots * slot_bytes; }
};

// The memory that each thread has. Value type.
struct Budget {
  unsigned threads = 1;
  std::uint64_t chunk_bytes = 0;    // of one read
  Slot whole{};                     // for values that are read into memory as they are
  Slot staging{};                   // for the bytes that windows of values are made of
  std::uint64_t window_bytes = 0;   // of numbers, or of values that go to files or devices
  std::uint64_t numbers_bytes = 0;  // of windows that are made outside of slots
  std::uint64_t piece_bytes = 0;    // of numbers that are quantized in one go
  std::uint64_t encoded_bytes = 0;  // that these become before they go to files or devices
  std::uint64_t merge_bytes = 0;    // of numbers that are computed from several values
  // All threads together: what values keep from their first window to their last.
  std::uint64_t held_bytes = 0;
  Ring ring{};

  [[nodiscard]] std::uint64_t window_thread_bytes() const noexcept {
    return numbers_bytes + encoded_bytes + merge_bytes + staging.used_bytes;
  }
  // A thread brings whole values, and then makes windows.
  [[nodiscard]] std::uint64_t thread_bytes() const noexcept {
    return std::max(whole.used_bytes, window_thread_bytes());
  }
  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return threads * thread_bytes() + held_bytes + ring.bytes();
  }
};

}  // namespace loadstone
