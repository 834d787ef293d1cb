#include "storage/page_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "base/ceil_div.h"

namespace loadstone {

namespace {

constexpr std::uint64_t looked_at_bytes = std::uint64_t{1} << 20;
// Size of each request, because the kernel truncates larger ones to the device's read-ahead.
constexpr std::uint64_t asked_at_once = 128 << 10;
constexpr std::uint64_t samples_max = 256;

constexpr long cachestat_number = 451;  // on all architectures except Alpha; glibc defines no name

struct CacheRange {
  std::uint64_t offset;
  std::uint64_t bytes;
};

struct CachePages {
  std::uint64_t cached, dirty, in_writeback, evicted, recently_evicted;
};

// Returns true if the byte is cached or being read; nullopt if unknown. Linux 6.5 and later have
// cachestat(). It works for files that the user may write. preadv2() works for all files, but
// starts to read the page, which a fast device may deliver before the call returns. mincore() is
// not used, because it reports pages as cached if the file belongs to another user and is not
// writable.
std::optional<bool> is_cached(int descriptor, std::uint64_t offset) noexcept {
  const CacheRange range = {offset, 1};
  CachePages pages = {};
  if (::syscall(cachestat_number, descriptor, &range, &pages, 0U) == 0) return pages.cached > 0;
  std::byte byte{};
  const iovec one = {&byte, 1};
  if (::preadv2(descriptor, &one, 1, static_cast<off_t>(offset), RWF_NOWAIT) >= 0) return true;
  if (errno == EAGAIN) return false;
  return std::nullopt;
}

std::uint64_t ask(int descriptor, std::uint64_t begin, std::uint64_t end) noexcept {
  std::uint64_t asked = 0;
  for (; begin < end; begin += asked_at_once) {
    const std::uint64_t count = std::min(asked_at_once, end - begin);
    const int problem = ::posix_fadvise(descriptor, static_cast<off_t>(begin),
                                        static_cast<off_t>(count), POSIX_FADV_WILLNEED);
    if (problem == 0) asked += count;
  }
  return asked;
}

}  // namespace

std::optional<double> cached_share_of(int descriptor, std::uint64_t bytes) {
  if (bytes == 0) return 1;
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t pages = ceil_div(bytes, page_bytes);
  const std::uint64_t samples = std::min(pages, samples_max);
  std::uint64_t cached = 0;
  for (std::uint64_t i = 0; i < samples; ++i) {
    const auto found = is_cached(descriptor, pages * i / samples * page_bytes);
    if (!found) return std::nullopt;
    cached += *found ? 1 : 0;
  }
  return static_cast<double>(cached) / static_cast<double>(samples);
}

std::uint64_t prefetch_missing(int descriptor, std::uint64_t begin, std::uint64_t bytes) noexcept {
  struct stat status = {};
  if (::fstat(descriptor, &status) != 0) return 0;
  const std::uint64_t end = std::min(begin + bytes, static_cast<std::uint64_t>(status.st_size));
  std::uint64_t asked = 0;
  while (begin < end) {
    const std::uint64_t part_end = std::min(end, (begin / looked_at_bytes + 1) * looked_at_bytes);
    // Checks the last byte, because the first page may have been read for preceding bytes.
    if (!is_cached(descriptor, part_end - 1).value_or(false)) {
      asked += ask(descriptor, begin, part_end);
    }
    begin = part_end;
  }
  return asked;
}

}  // namespace loadstone
