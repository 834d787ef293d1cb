#include "storage/page_cache.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <vector>

namespace loadstone {

namespace {

constexpr std::uint64_t view_bytes_max = std::uint64_t{1} << 30;
constexpr std::uint64_t looked_at_bytes = std::uint64_t{1} << 20;

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

std::uint64_t prefetch_missing(int descriptor, std::uint64_t begin, std::uint64_t bytes) noexcept {
  const auto page_bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t first = begin / page_bytes * page_bytes;
  const std::uint64_t size = begin + bytes - first;
  if (bytes == 0) return 0;
  // Nothing is read through this view: it is how the system is asked.
  auto* const view = static_cast<std::byte*>(
      ::mmap(nullptr, size, PROT_READ, MAP_SHARED, descriptor, static_cast<off_t>(first)));
  const bool is_known = view != MAP_FAILED;
  std::uint64_t asked = 0;
  for (std::uint64_t at = 0; at < size; at += looked_at_bytes) {
    const std::uint64_t part = std::min(looked_at_bytes, size - at);
    unsigned char page = 0;
    if (is_known && ::mincore(view + at, page_bytes, &page) == 0 && (page & 1) != 0) continue;
    const auto from = static_cast<off_t>(first + at);
    if (::posix_fadvise(descriptor, from, static_cast<off_t>(part), POSIX_FADV_WILLNEED) == 0) {
      asked += part;
    }
  }
  if (is_known) ::munmap(view, size);
  return asked;
}

}  // namespace loadstone
