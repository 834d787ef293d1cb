#pragma once

#include <sys/socket.h>

#include <string>

namespace loadstone {

// Loopback, link-local, private and shared networks: addresses that mean another machine to each
// one who asks.
[[nodiscard]] bool is_private_address(const sockaddr& address) noexcept;
// As text; false where it is none.
[[nodiscard]] bool is_private_address(const std::string& address) noexcept;

}  // namespace loadstone
