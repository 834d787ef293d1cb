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
    {0xa9fe0000, 16},  // link-local, where clouds keep their metadata
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

bool is_private_v6(const in6_addr& address) noexcept {
  const std::uint8_t* const bytes = address.s6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&address) != 0 || IN6_IS_ADDR_V4COMPAT(&address) != 0) {
    std::uint32_t inner = 0;
    std::memcpy(&inner, bytes + 12, sizeof inner);
    return is_private_v4(ntohl(inner));
  }
  const bool is_unique_local = (bytes[0] & 0xfe) == 0xfc;
  const bool is_own = IN6_IS_ADDR_LOOPBACK(&address) != 0 || IN6_IS_ADDR_UNSPECIFIED(&address) != 0;
  return is_own || is_unique_local || IN6_IS_ADDR_LINKLOCAL(&address) != 0 ||
         IN6_IS_ADDR_MULTICAST(&address) != 0;
}

}  // namespace

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
  return true;  // a socket of this machine
}

bool is_private_address(const std::string& address) noexcept {
  sockaddr_storage storage = {};
  sockaddr_in in = {};
  in.sin_family = AF_INET;
  if (::inet_pton(AF_INET, address.c_str(), &in.sin_addr) == 1) {
    std::memcpy(&storage, &in, sizeof in);
  } else {
    sockaddr_in6 in6 = {};
    in6.sin6_family = AF_INET6;
    if (::inet_pton(AF_INET6, address.c_str(), &in6.sin6_addr) != 1) return false;
    std::memcpy(&storage, &in6, sizeof in6);
  }
  return is_private_address(reinterpret_cast<const sockaddr&>(storage));
}

}  // namespace loadstone
