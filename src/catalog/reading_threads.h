#pragma once

#include <cstdint>

#include "loadstone/catalog.h"

namespace loadstone {

// Returns the number of concurrent reads that the shards prefer; 0 if all shards are local.
[[nodiscard]] unsigned reads_at_once(const Catalog& catalog) noexcept;

// Returns the number of threads that the caller requests. For 0, returns the number of concurrent
// reads that the shards prefer, or else one thread per core, at most `most`.
[[nodiscard]] unsigned reading_threads(const Catalog& catalog, unsigned wanted,
                                       unsigned most) noexcept;

// Returns the initial number of readers. It is small, because more readers join if that is faster.
// If the shards prefer concurrent reads, it is the number of all threads.
[[nodiscard]] unsigned first_readers(const Catalog& catalog, unsigned threads) noexcept;

// Returns the threads' memory in addition to the bytes they read: 0 for local shards.
[[nodiscard]] std::uint64_t reading_bytes(const Catalog& catalog, unsigned threads) noexcept;
// Returns the result that reading_bytes() would have if all shards were remote.
[[nodiscard]] std::uint64_t reading_bytes_if_remote(const Catalog& catalog,
                                                    unsigned threads) noexcept;

}  // namespace loadstone
