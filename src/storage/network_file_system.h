// Which file systems bring their bytes from another machine.
#pragma once

#include <cstdint>

namespace loadstone {

// By the number that statfs() gives. A mapped file of such a system ends the program with SIGBUS
// where the network fails, and each page of it may be a request of its own. FUSE counts as one: it
// is what most stores of objects are mounted with, and it does not say what is behind it.
[[nodiscard]] bool is_network_file_system(std::uint32_t type) noexcept;

[[nodiscard]] bool is_on_network(int descriptor) noexcept;

}  // namespace loadstone
