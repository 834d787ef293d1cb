// Recognises file systems whose bytes come from another machine.
#pragma once

#include <cstdint>

namespace loadstone {

// `type`: the type from statfs(). If the network fails, access to a mapped file of a network file
// system kills the program with SIGBUS, and each page may be a separate request. FUSE counts as a
// network, because most object stores are mounted with it, and it does not report the system
// behind it.
[[nodiscard]] bool is_network_file_system(std::uint32_t type) noexcept;

[[nodiscard]] bool is_on_network(int descriptor) noexcept;

}  // namespace loadstone
