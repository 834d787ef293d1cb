#include "catalog/reading_threads.h"

#include <algorithm>

#include "base/thread_count.h"
#include "loadstone/defaults.h"

namespace loadstone {

unsigned reading_threads(const Catalog& catalog, unsigned wanted, unsigned most) noexcept {
  unsigned at_once = 0;
  for (const Shard& shard : catalog.shards()) at_once = std::max(at_once, shard.reads_at_once);
  if (wanted == 0 && at_once != 0) return std::min(at_once, defaults::threads_most);
  return thread_count(wanted, most);
}

}  // namespace loadstone
