// Reports a disk with too little space before anything is written.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "loadstone/finding.h"

namespace loadstone {

// Returns error "io.no_space" if less than `needed` is free. If the free space is unknown, a write
// fails later.
// `what`: the noun before the path, such as "the target".
[[nodiscard]] std::optional<Finding> space_finding(std::string_view what, const std::string& path,
                                                   std::uint64_t needed,
                                                   std::optional<std::uint64_t> free);

}  // namespace loadstone
