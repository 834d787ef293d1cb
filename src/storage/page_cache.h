// What the system's page cache holds of a file.
#pragma once

#include <cstdint>
#include <optional>

namespace loadstone {

// From 0 to 1; none where the system does not say it.
[[nodiscard]] std::optional<double> cached_share_of(int descriptor, std::uint64_t bytes);

}  // namespace loadstone
