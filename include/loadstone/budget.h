// Memory for bytes under way: what a plan promises, and what the engine sizes itself by.
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

// The memory that each thread has. Value type.
struct Budget {
  unsigned threads = 1;
  std::uint64_t chunk_bytes = 0;    // of one read
  Slot whole{};                     // for values that are read into memory as they are
  Slot staging{};                   // for the bytes that windows of values are made of
  std::uint64_t window_bytes = 0;   // of numbers, or of values that go to files
  std::uint64_t piece_bytes = 0;    // of numbers that are quantized in one go
  std::uint64_t encoded_bytes = 0;  // that these become before they go to files
  std::uint64_t merge_bytes = 0;    // of numbers that are computed from several values
  // All threads together: what values keep from their first window to their last.
  std::uint64_t held_bytes = 0;

  [[nodiscard]] std::uint64_t window_thread_bytes() const noexcept {
    return window_bytes + encoded_bytes + merge_bytes + staging.used_bytes;
  }
  // A thread brings whole values, and then makes windows.
  [[nodiscard]] std::uint64_t thread_bytes() const noexcept {
    return std::max(whole.used_bytes, window_thread_bytes());
  }
  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return threads * thread_bytes() + held_bytes;
  }
};

}  // namespace loadstone
