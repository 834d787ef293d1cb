// Declares the memory that remote reads need in addition to the data. Budgets include this memory,
// and requests do not exceed it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace loadstone {

// Size of libcurl's receive buffer.
inline constexpr std::uint64_t remote_buffer_bytes = 512 << 10;
// Memory of a request: libcurl's buffer, and the same size for the connection's state and the
// allocator, as measured with 1, 4 and 16 requests.
inline constexpr std::uint64_t remote_request_bytes = 2 * remote_buffer_bytes;
// Limits of the cache for small reads, which has one block for each of the most recently read
// files.
inline constexpr std::uint64_t remote_block_bytes_max = 256 << 10;
inline constexpr std::size_t remote_blocks_max = 16;

// Returns the memory for concurrent requests and open files.
[[nodiscard]] constexpr std::uint64_t remote_bytes(unsigned requests, std::size_t files) noexcept {
  if (files == 0) return 0;
  return requests * remote_request_bytes +
         std::min(files, remote_blocks_max) * remote_block_bytes_max;
}

}  // namespace loadstone
