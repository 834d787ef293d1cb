#pragma once

#include <cstdint>

#include "loadstone/catalog.h"

namespace loadstone {

// As many threads as the caller wants; 0: as many as the shards want reads under way at once, else
// one per core, at most `most`.
[[nodiscard]] unsigned reading_threads(const Catalog& catalog, unsigned wanted,
                                       unsigned most) noexcept;

// How many of so many begin a load: few, for more join where that makes it faster. All of them
// where shards want reads under way at once.
[[nodiscard]] unsigned first_readers(const Catalog& catalog, unsigned threads) noexcept;

// Memory of so many threads beside the bytes they read: none where the shards are on this machine.
[[nodiscard]] std::uint64_t reading_bytes(const Catalog& catalog, unsigned threads) noexcept;
// The same, were all shards on another machine.
[[nodiscard]] std::uint64_t reading_bytes_if_remote(const Catalog& catalog,
                                                    unsigned threads) noexcept;

}  // namespace loadstone
