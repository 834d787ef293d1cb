// Observer: receives the progress of a load, conversion or check, and can cancel it.
#pragma once

#include <cstdint>

#include "loadstone/export.h"

namespace loadstone {

struct Progress {
  // Bytes read. convert() counts bytes of its output instead, in proportion to the bytes read.
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
  // Part of bytes_done in finished shards, which a resumed conversion first compares.
  std::uint64_t bytes_checked = 0;
};

// loadstone calls the observer about 20 times a second, never concurrently, from the thread that
// called execute(), convert(), verify_values() or compare().
//
// Cancel from a different thread or from a signal handler by an atomic flag that on_progress()
// reads. After "cancelled" no thread of loadstone is running. The destinations of execute() then
// contain undefined bytes, and you may reuse or free them. convert() removes unfinished output;
// with ConvertRun::resume it keeps finished shards. open_checkpoint() and make_plan() have no
// observer; RemoteOptions::is_stopped cancels their reads of remote files.
class LOADSTONE_API Observer {
 public:
  virtual ~Observer() = default;
  // Return false to cancel: the function in progress then throws Error "cancelled" within 0.2 s. An
  // exception of any type also stops the function, which rethrows it unchanged.
  virtual bool on_progress(const Progress& progress) = 0;
};

}  // namespace loadstone
