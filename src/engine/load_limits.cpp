// What a load may take: never more than its plan promised.
#include <algorithm>
#include <cstdint>

#include "engine/limits.h"

namespace loadstone {

Budget load_budget(const Needs& needs, const Promise& promise, unsigned threads,
                   std::uint64_t chunk_bytes) {
  Budget promised = needs.budget({.threads = promise.threads, .bytes_max = promise.bytes_max});
  const std::uint64_t most = needs.bytes_under_way(promised);
  // More threads may take more in all: then each has less, or there are fewer.
  for (unsigned count = threads; count > 0; --count) {
    for (const std::uint64_t bytes : {promise.bytes_max, most}) {
      const Budget wished = needs.budget({.threads = count,
                                          .bytes_max = bytes,
                                          .held_bytes_max = promised.held_bytes,
                                          .chunk_bytes = chunk_bytes});
      if (needs.bytes_under_way(wished) <= most) return wished;
    }
  }
  promised.threads = std::min(promised.threads, threads);
  return promised;
}

std::uint64_t bytes_promised(const Needs& needs, const Promise& promise) {
  return needs.bytes_under_way(load_budget(needs, promise, promise.threads));
}

}  // namespace loadstone
