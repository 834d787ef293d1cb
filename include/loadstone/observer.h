// Watching a load, and stopping it.
#pragma once

#include <cstdint>

namespace loadstone {

struct Progress {
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
};

// Called from the thread that called execute(), about 20 times a second, never at the same time.
class Observer {
 public:
  virtual ~Observer() = default;
  // Return false to cancel: execute() then throws Error "cancelled" within 0.2 s.
  virtual bool on_progress(const Progress& progress) = 0;
};

}  // namespace loadstone
