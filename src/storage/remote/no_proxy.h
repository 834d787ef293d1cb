// The list of hosts that are reached without the proxy.
#pragma once

#include <string_view>

namespace loadstone {

// Returns true if `list` names the host, by libcurl's rules: entries between commas or spaces; "*"
// names all hosts, a domain itself and every host below it, an address itself, "10.0.0.0/8" a
// network.
[[nodiscard]] bool is_without_proxy(std::string_view host, std::string_view list);

}  // namespace loadstone
