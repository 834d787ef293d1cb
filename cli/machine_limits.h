// Measures how fast this machine can move given bytes of files. Each function makes one
// measurement, returns seconds, and allocates and frees its own memory. `threads` must be at least
// 1. The functions throw Error "cancelled" if the user interrupts, "io.*" if a file does not open
// or ends early, and "memory.host".
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

// Populates new pages of private memory.
[[nodiscard]] double seconds_to_populate(std::uint64_t bytes, unsigned threads);
// Copies bytes between two buffers whose memory is already populated.
[[nodiscard]] double seconds_to_copy(std::uint64_t bytes, unsigned threads);

enum class ReadInto { memory_at_hand, new_memory };
// Reads with pread(), 4 MiB at a time, and never reuses a destination buffer. The caller determines
// whether the page cache contains the bytes.
[[nodiscard]] double seconds_to_read(const std::vector<Extent>& extents, unsigned threads,
                                     ReadInto into);
// Reads the same bytes without the page cache (O_DIRECT), into one buffer per thread. Returns
// nullopt if the file system does not support it.
[[nodiscard]] std::optional<double> seconds_to_read_direct(const std::vector<Extent>& extents,
                                                           unsigned threads);

// Writes bytes that do not compress to a new file in the folder, flushes them to the disk, and
// removes the file.
[[nodiscard]] double seconds_to_write(const std::string& folder, std::uint64_t bytes);

// Bytes that seconds_to_encode() encodes.
[[nodiscard]] std::uint64_t bytes_to_encode(unsigned threads) noexcept;
// Encodes BF16 values in memory. Throws Error "usage" if loadstone cannot write the encoding.
[[nodiscard]] double seconds_to_encode(const std::string& encoding, unsigned threads);

// Drops these bytes from the page cache, except pages that a different process has mapped and pages
// that are not written to disk yet. Returns true if at most 1 % of the bytes remain.
[[nodiscard]] bool drop_from_page_cache(const std::vector<Extent>& extents);

}  // namespace loadstone::cli
