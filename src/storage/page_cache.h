// What the system's page cache holds of a file.
#pragma once

#include <cstdint>
#include <optional>

namespace loadstone {

// From 0 to 1, by a sample of at most 256 pages; none where the system does not say it.
[[nodiscard]] std::optional<double> cached_share_of(int descriptor, std::uint64_t bytes);

// Asks the system to fetch what the cache lacks of a range, or may lack where it does not say so.
// One byte in a MiB is looked at, for the others are mostly as it is. Returns for how many bytes it
// was asked.
std::uint64_t prefetch_missing(int descriptor, std::uint64_t begin, std::uint64_t bytes) noexcept;

}  // namespace loadstone
