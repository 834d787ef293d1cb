#pragma once

#include <algorithm>
#include <thread>

namespace loadstone {

// As many threads as the caller wants; 0: one per core, at most `most`.
[[nodiscard]] inline unsigned thread_count(unsigned wanted, unsigned most) noexcept {
  return wanted != 0 ? wanted : std::clamp(std::thread::hardware_concurrency(), 1u, most);
}

}  // namespace loadstone
