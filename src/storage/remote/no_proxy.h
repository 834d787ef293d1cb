// Matches hosts against the list of hosts to reach without a proxy.
#pragma once

#include <string_view>

namespace loadstone {

// Returns true if `list` contains the host, by libcurl's rules. Entries are separated by commas or
// spaces. "*" matches all hosts, a domain matches itself and every host below it, an address
// matches itself, and an entry such as "10.0.0.0/8" matches a network.
[[nodiscard]] bool is_without_proxy(std::string_view host, std::string_view list);

}  // namespace loadstone
