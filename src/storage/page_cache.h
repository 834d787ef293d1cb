// Examines and fills the system's page cache for a file.
#pragma once

#include <cstdint>
#include <optional>

namespace loadstone {

// Returns the cached share of a file, from 0 to 1, based on at most 256 pages. Returns nullopt if
// the system does not report it.
[[nodiscard]] std::optional<double> cached_share_of(int descriptor, std::uint64_t bytes);

// Asks the system to fetch the parts of a range that are not cached, or may not be. Checks one byte
// per MiB, because neighbouring bytes are usually in the same state. Returns the number of bytes
// requested.
std::uint64_t prefetch_missing(int descriptor, std::uint64_t begin, std::uint64_t bytes) noexcept;

}  // namespace loadstone
