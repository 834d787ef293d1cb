// Writes a plan as the JSON that the page's script reads.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "loadstone/page.h"

namespace loadstone {

// Returns the peak memory of each device: the plan's peak plus the other memory in the options.
[[nodiscard]] std::map<std::string, std::uint64_t> peaks_of(const Plan& plan,
                                                            const PageOptions& options);

// Returns JSON that can be embedded in a script element, because it contains no '<'.
[[nodiscard]] std::string page_data(const Plan& plan, const PageOptions& options);

}  // namespace loadstone
