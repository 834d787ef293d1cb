// Progress of a load, and its cancellation.
#pragma once

#include <cstdint>

#include "loadstone/export.h"

namespace loadstone {

struct Progress {
  std::uint64_t bytes_done = 0;  // of a resumed conversion, begins with the shards that it keeps
  std::uint64_t bytes_total = 0;
};

// Called from the thread that called execute(), convert(), verify_values() or compare(), about 20
// times a second, never concurrently.
class LOADSTONE_API Observer {
 public:
  virtual ~Observer() = default;
  // Return false to cancel: that function then throws Error "cancelled" within 0.2 s. An exception
  // of any type also stops the work, and that function rethrows it unchanged.
  virtual bool on_progress(const Progress& progress) = 0;
};

}  // namespace loadstone
