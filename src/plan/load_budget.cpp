// What a load may take: never more than its plan promised.
#include <algorithm>
#include <cstdint>

#include "plan/budget.h"

namespace loadstone {

Budget load_budget(const Plan& plan, const Needs& needs, unsigned threads,
                   std::uint64_t chunk_bytes) {
  Budget promised = needs.budget({.threads = plan.threads, .bytes_max = plan.staging_bytes_max});
  const std::uint64_t promise = needs.bytes_under_way(promised);
  // More threads may take more in all: then each has less, or there are fewer.
  for (unsigned count = threads; count > 0; --count) {
    for (const std::uint64_t bytes : {plan.staging_bytes_max, promise}) {
      const Budget wished = needs.budget({.threads = count,
                                          .bytes_max = bytes,
                                          .held_bytes_max = promised.held_bytes,
                                          .chunk_bytes = chunk_bytes});
      if (needs.bytes_under_way(wished) <= promise) return wished;
    }
  }
  promised.threads = std::min(promised.threads, threads);
  return promised;
}

std::uint64_t bytes_promised(const Plan& plan, const Needs& needs) {
  return needs.bytes_under_way(load_budget(plan, needs, plan.threads));
}

}  // namespace loadstone
