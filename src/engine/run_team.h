// Runs the threads of a load, a conversion or a verification, and reports their progress.
#pragma once

#include <atomic>
#include <functional>

#include "base/team.h"
#include "engine/reader_growth.h"
#include "loadstone/observer.h"

namespace loadstone {

// Does `work` in as many threads as `growth` requests. `growth` is consulted repeatedly, and more
// threads may join. `observer` (may be null) receives the progress. Rethrows the first failure.
// Throws Error "cancelled" if the observer cancels, and CallerException if it throws.
void run_team(ReaderGrowth& growth, std::atomic<bool>& stop, Observer* observer,
              const std::function<Progress()>& progress, const Team::Work& work);
// Runs the work in `count` threads.
void run_team(unsigned count, std::atomic<bool>& stop, Observer* observer,
              const std::function<Progress()>& progress, const Team::Work& work);

}  // namespace loadstone
