// A plan as the page's script reads it.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "loadstone/page.h"

namespace loadstone {

// By device: the plan's, and what is held beside it.
[[nodiscard]] std::map<std::string, std::uint64_t> peaks_of(const Plan& plan,
                                                            const PageOptions& options);

// JSON that can stand in a script element: no '<' is in it.
[[nodiscard]] std::string page_data(const Plan& plan, const PageOptions& options);

}  // namespace loadstone
