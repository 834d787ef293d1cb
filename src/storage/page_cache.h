// The part of a file that is in the system's page cache.
#pragma once

#include <cstdint>
#include <optional>

namespace loadstone {

// A share from 0 to 1, from a sample of at most 256 pages; nullopt if the system does not report
// it.
[[nodiscard]] std::optional<double> cached_share_of(int descriptor, std::uint64_t bytes);

// Asks the system to fetch the parts of a range that the cache lacks, or may lack. Checks one byte
// per MiB, because its neighbours are usually in the same state. Returns the number of bytes
// requested.
std::uint64_t prefetch_missing(int descriptor, std::uint64_t begin, std::uint64_t bytes) noexcept;

}  // namespace loadstone
