#include "storage/remote/private_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

namespace loadstone {

namespace {

struct Network {
  std::uint32_t address;
  unsigned bits;
};

constexpr std::array<Network, 9> private_networks = {{
    {0x00000000, 8},   // this network
    {0x0a000000, 8},   // RFC 1918
    {0x64400000, 10},  // shared by carriers, RFC 6598
    {0x7f000000, 8},   // loopback
    {0xa9fe0000, 16},  // link-local: metadata services of clouds
    {0xac100000, 12},  // RFC 1918
    {0xc0000000, 24},  // IETF protocols
    {0xc0a80000, 16},  // RFC 1918
    {0xe0000000, 3},   // multicast and reserved
}};

bool is_private_v4(std::uint32_t address) noexcept {
  return std::ranges::any_of(private_networks, [&](const Network& network) {
    return (address ^ network.address) >> (32 - network.bits) == 0;
  });
}

struct NetworkV6 {
  std::array<std::uint8_t, 12> prefix;
  unsigned bits;
  int inner;  // byte offset of the embedded IPv4 address; -1 if the whole range is private
};

// Private ranges, and ranges in which `inner` is the address that a translator or tunnel sends to.
constexpr std::array<NetworkV6, 10> networks_v6 = {{
    {{0xfc}, 7, -1},                                       // unique local
    {{0xfe, 0x80}, 10, -1},                                // link-local
    {{0xfe, 0xc0}, 10, -1},                                // site-local, RFC 3879
    {{0xff}, 8, -1},                                       // multicast
    {{0x00, 0x64, 0xff, 0x9b, 0x00, 0x01}, 48, -1},        // local NAT64, RFC 8215
    {{0x00, 0x64, 0xff, 0x9b}, 96, 12},                    // NAT64, RFC 6052
    {{0x20, 0x02}, 16, 2},                                 // 6to4, RFC 3056
    {{}, 96, 12},                                          // IPv4-compatible, ::1 and ::
    {{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff}, 96, 12},  // IPv4-mapped
    {{0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff}, 96, 12},        // IPv4-translated, RFC 2765
}};

bool is_private_v6(const in6_addr& address) noexcept {
  return std::ranges::any_of(networks_v6, [&](const NetworkV6& network) {
    if (!have_same_bits(address.s6_addr, network.prefix, network.bits)) return false;
    if (network.inner < 0) return true;
    std::uint32_t inner = 0;
    std::memcpy(&inner, address.s6_addr + network.inner, sizeof inner);
    return is_private_v4(ntohl(inner));
  });
}

}  // namespace

bool have_same_bits(std::span<const unsigned char> a, std::span<const unsigned char> b,
                    unsigned bits) noexcept {
  for (unsigned bit = 0; bit < bits; ++bit) {
    const unsigned mask = 0x80u >> (bit % 8);
    if (((a[bit / 8] ^ b[bit / 8]) & mask) != 0) return false;
  }
  return true;
}

bool is_private_address(const sockaddr& address) noexcept {
  if (address.sa_family == AF_INET) {
    sockaddr_in in = {};
    std::memcpy(&in, &address, sizeof in);
    return is_private_v4(ntohl(in.sin_addr.s_addr));
  }
  if (address.sa_family == AF_INET6) {
    sockaddr_in6 in = {};
    std::memcpy(&in, &address, sizeof in);
    return is_private_v6(in.sin6_addr);
  }
  return true;  // other families are sockets of this machine
}

std::optional<bool> is_private_address(const std::string& address) noexcept {
  sockaddr_storage storage = {};
  sockaddr_in in = {};
  in.sin_family = AF_INET;
  if (::inet_pton(AF_INET, address.c_str(), &in.sin_addr) == 1) {
    std::memcpy(&storage, &in, sizeof in);
  } else {
    sockaddr_in6 in6 = {};
    in6.sin6_family = AF_INET6;
    if (::inet_pton(AF_INET6, address.c_str(), &in6.sin6_addr) != 1) return std::nullopt;
    std::memcpy(&storage, &in6, sizeof in6);
  }
  return is_private_address(reinterpret_cast<const sockaddr&>(storage));
}

}  // namespace loadstone
