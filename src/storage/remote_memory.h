// Memory that reading from other machines takes beside what is read: budgets count it, and what
// takes it keeps to it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace loadstone {

// Of libcurl, for what has come and was not yet taken.
inline constexpr std::uint64_t remote_buffer_bytes = 512 << 10;
// Of a request: that buffer, and as much for the connection's own state and the allocator's, as
// measured with 1, 4 and 16 of them.
inline constexpr std::uint64_t remote_request_bytes = 2 * remote_buffer_bytes;
// Blocks for small reads: one of each of the files that were read last.
inline constexpr std::uint64_t remote_block_bytes_max = 256 << 10;
inline constexpr std::size_t remote_blocks_max = 16;

// With so many requests at once, of so many files.
[[nodiscard]] constexpr std::uint64_t remote_bytes(unsigned requests, std::size_t files) noexcept {
  if (files == 0) return 0;
  return requests * remote_request_bytes +
         std::min(files, remote_blocks_max) * remote_block_bytes_max;
}

}  // namespace loadstone
