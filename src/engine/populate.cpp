#include "engine/populate.h"

#include <sys/mman.h>

#include "engine/limits.h"

namespace loadstone {

namespace {

// A call has its price too.
constexpr std::uint64_t bytes_min = 64 << 10;

#ifdef MADV_POPULATE_WRITE
constexpr int populate_write = MADV_POPULATE_WRITE;
#else
constexpr int populate_write = 23;  // Linux 5.14; older ones refuse it
#endif

}  // namespace

void populate(std::byte* data, std::uint64_t bytes) noexcept {
  if (bytes < bytes_min) return;
  // If pages are larger, the call fails, and nothing else happens.
  const std::uintptr_t skipped = reinterpret_cast<std::uintptr_t>(data) % page_bytes;
  ::madvise(data - skipped, static_cast<std::size_t>(bytes + skipped), populate_write);
}

}  // namespace loadstone
