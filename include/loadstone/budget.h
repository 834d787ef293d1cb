// Memory budget for bytes in flight. The plan reports it, and the engine allocates no more.
#pragma once

#include <algorithm>
#include <cstdint>

namespace loadstone {

// Address space in which a thread stages bytes. The thread writes only to the first `used_bytes`,
// so the other pages take no memory.
struct Slot {
  std::uint64_t bytes = 0;
  std::uint64_t used_bytes = 0;
};

// Host memory from which bytes are copied to devices, shared by all threads. Each thread has two
// slots, so that it fills one while the other is copied. A slot contains a window, or several small
// values.
struct Ring {
  unsigned slots = 0;
  std::uint64_t slot_bytes = 0;

  [[nodiscard]] std::uint64_t bytes() const noexcept { return slots * slot_bytes; }
};

// Memory of the engine. Sizes are per thread, except those of `held_bytes` and `ring`. Value type.
struct Budget {
  unsigned threads = 1;
  std::uint64_t chunk_bytes = 0;    // bytes per read
  Slot whole{};                     // for values that are read unchanged
  Slot staging{};                   // for the source bytes of windows
  std::uint64_t window_bytes = 0;   // bytes per window of decoded or converted values
  std::uint64_t numbers_bytes = 0;  // for windows that are computed outside of slots
  std::uint64_t piece_bytes = 0;    // bytes of values that a thread quantizes in one step
  std::uint64_t encoded_bytes = 0;  // for the codes of one quantization step
  std::uint64_t merge_bytes = 0;    // for merges of several sources
  // State that a quantization keeps from its first window to its last, for all threads together.
  std::uint64_t held_bytes = 0;
  Ring ring{};

  [[nodiscard]] std::uint64_t window_thread_bytes() const noexcept {
    return numbers_bytes + encoded_bytes + merge_bytes + staging.used_bytes;
  }
  // A thread reads whole values first and makes windows afterwards, never both at once.
  [[nodiscard]] std::uint64_t thread_bytes() const noexcept {
    return std::max(whole.used_bytes, window_thread_bytes());
  }
  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return threads * thread_bytes() + held_bytes + ring.bytes();
  }
};

}  // namespace loadstone
