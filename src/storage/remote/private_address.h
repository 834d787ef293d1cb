#pragma once

#include <sys/socket.h>

#include <optional>
#include <span>
#include <string>

namespace loadstone {

// Returns true if the first bits of two addresses, in network order, are the same.
[[nodiscard]] bool have_same_bits(std::span<const unsigned char> a,
                                  std::span<const unsigned char> b, unsigned bits) noexcept;

// Returns true for loopback, link-local, private and shared networks, whose addresses refer to
// different machines for different callers. Also returns true for IPv6 addresses that a translator
// or tunnel sends to such a network.
[[nodiscard]] bool is_private_address(const sockaddr& address) noexcept;
// Returns nullopt for text that is not an address.
[[nodiscard]] std::optional<bool> is_private_address(const std::string& address) noexcept;

}  // namespace loadstone
