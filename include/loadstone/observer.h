// Watching a load, and stopping it.
#pragma once

#include <cstdint>

#include "loadstone/export.h"

namespace loadstone {

struct Progress {
  std::uint64_t bytes_done = 0;  // a resumed conversion first counts shards that it keeps
  std::uint64_t bytes_total = 0;
};

// Called from the thread that called execute(), convert(), verify_values() or compare(), about 20
// times a second, never at the same time.
class LOADSTONE_API Observer {
 public:
  virtual ~Observer() = default;
  // Return false to cancel: that function then throws Error "cancelled" within 0.2 s. What this
  // throws, of whatever type, stops the work as well and comes out of that function as it is.
  virtual bool on_progress(const Progress& progress) = 0;
};

}  // namespace loadstone
