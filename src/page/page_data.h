// A plan as the page's script reads it.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "loadstone/page.h"

namespace loadstone {

// By device: the plan's peak plus other memory.
[[nodiscard]] std::map<std::string, std::uint64_t> peaks_of(const Plan& plan,
                                                            const PageOptions& options);

// Returns JSON for a script element: it contains no '<'.
[[nodiscard]] std::string page_data(const Plan& plan, const PageOptions& options);

}  // namespace loadstone
