#include "storage/page_cache.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace loadstone {

namespace {

constexpr std::uint64_t view_bytes_max = std::uint64_t{1} << 30;

// Pages of this part of the file that are in the cache; none where that cannot be told.
std::optional<std::uint64_t> cached_pages(int descriptor, std::uint64_t begin, std::uint64_t bytes,
                                          std::vector<unsigned char>& pages) {
  void* const view =
      ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, descriptor, static_cast<off_t>(begin));
  if (view == MAP_FAILED) return std::nullopt;
  const int status = ::mincore(view, bytes, pages.data());
  ::munmap(view, bytes);
  if (status != 0) return std::nullopt;
  return std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; });
}

}  // namespace

std::optional<double> cached_share_of(int descriptor, std::uint64_t bytes) {
  if (bytes == 0) return 1;
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages;
  std::uint64_t cached = 0;
  for (std::uint64_t begin = 0; begin < bytes; begin += view_bytes_max) {
    const std::uint64_t part = std::min(view_bytes_max, bytes - begin);
    pages.assign((part + page_bytes - 1) / page_bytes, 0);
    const auto found = cached_pages(descriptor, begin, part, pages);
    if (!found) return std::nullopt;
    cached += *found;
  }
  return static_cast<double>(cached) / static_cast<double>((bytes + page_bytes - 1) / page_bytes);
}

}  // namespace loadstone
