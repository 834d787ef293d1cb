#include "execute/populate.h"

#include <sys/mman.h>

namespace loadstone {

namespace {

// A call has its price too.
constexpr std::uint64_t bytes_min = 64 << 10;
constexpr std::uintptr_t page_bytes =
    4096;  // the smallest: on others the call fails and that is all

#ifdef MADV_POPULATE_WRITE
constexpr int populate_write = MADV_POPULATE_WRITE;
#else
constexpr int populate_write = 23;  // Linux 5.14; older ones refuse it
#endif

}  // namespace

void populate(std::byte* data, std::uint64_t bytes) noexcept {
  if (bytes < bytes_min) return;
  const std::uintptr_t skipped = reinterpret_cast<std::uintptr_t>(data) % page_bytes;
  ::madvise(data - skipped, static_cast<std::size_t>(bytes + skipped), populate_write);
}

}  // namespace loadstone
