#pragma once

#include <algorithm>
#include <thread>

#include "loadstone/defaults.h"

namespace loadstone {

// Returns the requested number of threads, at most defaults::threads_most. If `wanted` is 0,
// returns one per core, at most `most`.
[[nodiscard]] inline unsigned thread_count(unsigned wanted, unsigned most) noexcept {
  if (wanted != 0) return std::min(wanted, defaults::threads_most);
  return std::clamp(std::thread::hardware_concurrency(), 1u, most);
}

}  // namespace loadstone
