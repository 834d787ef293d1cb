// The machine's limits for given bytes of files: single measurements, in seconds, each of which
// allocates and frees its memory. `threads` is at least 1. Throw Error "cancelled" if the user
// interrupts, "io.*" if a file does not open or ends early, and "memory.host".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace loadstone::cli {

// Bytes [begin, end) of a file.
struct Extent {
  std::string path;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

[[nodiscard]] std::uint64_t byte_count(const std::vector<Extent>& extents) noexcept;

// New pages of private memory, ahead of any use.
[[nodiscard]] double seconds_to_populate(std::uint64_t bytes, unsigned threads);
// Copies within memory that is already populated.
[[nodiscard]] double seconds_to_copy(std::uint64_t bytes, unsigned threads);

enum class ReadInto { memory_at_hand, new_memory };
// pread() of 4 MiB at a time, to a separate place for each byte. The caller controls if the page
// cache has the bytes.
[[nodiscard]] double seconds_to_read(const std::vector<Extent>& extents, unsigned threads,
                                     ReadInto into);
// The same without the page cache (O_DIRECT), into one buffer per thread. nullopt if the file
// system does not support it.
[[nodiscard]] std::optional<double> seconds_to_read_direct(const std::vector<Extent>& extents,
                                                           unsigned threads);

// Drops these bytes from the page cache, except pages that another process has mapped or that are
// not written yet. Returns true if at most a hundredth is left.
[[nodiscard]] bool drop_from_page_cache(const std::vector<Extent>& extents);

}  // namespace loadstone::cli
