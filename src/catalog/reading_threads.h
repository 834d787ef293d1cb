#pragma once

#include <cstdint>

#include "loadstone/catalog.h"

namespace loadstone {

// Returns the number of threads that the caller requests; for 0, the concurrent reads that the
// shards prefer, else one per core, at most `most`.
[[nodiscard]] unsigned reading_threads(const Catalog& catalog, unsigned wanted,
                                       unsigned most) noexcept;

// Returns the initial number of readers: few, because more join if that is faster; all of them if
// the shards prefer concurrent reads.
[[nodiscard]] unsigned first_readers(const Catalog& catalog, unsigned threads) noexcept;

// Returns the threads' memory in addition to the bytes they read: 0 for local shards.
[[nodiscard]] std::uint64_t reading_bytes(const Catalog& catalog, unsigned threads) noexcept;
// The same, as if all shards were remote.
[[nodiscard]] std::uint64_t reading_bytes_if_remote(const Catalog& catalog,
                                                    unsigned threads) noexcept;

}  // namespace loadstone
