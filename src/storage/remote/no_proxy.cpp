#include "storage/remote/no_proxy.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstddef>
#include <optional>
#include <string>

#include "storage/remote/private_address.h"

namespace loadstone {

namespace {

struct IpAddress {
  std::array<unsigned char, 16> bytes{};
  unsigned bits = 0;  // 32 for IPv4, 128 for IPv6
};

std::optional<IpAddress> address_of(std::string_view text) {
  if (text.starts_with('[') && text.ends_with(']')) text = text.substr(1, text.size() - 2);
  const std::string name(text);
  IpAddress address;
  if (::inet_pton(AF_INET, name.c_str(), address.bytes.data()) == 1) {
    address.bits = 32;
  } else if (::inet_pton(AF_INET6, name.c_str(), address.bytes.data()) == 1) {
    address.bits = 128;
  } else {
    return std::nullopt;
  }
  return address;
}

bool is_in_network(const IpAddress& host, std::string_view entry) {
  const std::size_t slash = std::min(entry.find('/'), entry.size());
  const auto network = address_of(entry.substr(0, slash));
  if (!network || network->bits != host.bits) return false;
  unsigned bits = network->bits;
  if (slash < entry.size()) {
    const char* const end = entry.data() + entry.size();
    const auto [after, problem] = std::from_chars(entry.data() + slash + 1, end, bits);
    if (problem != std::errc() || after != end || bits > network->bits) return false;
  }
  return have_same_bits(host.bytes, network->bytes, bits);
}

std::string_view without_dots(std::string_view name) noexcept {
  if (name.starts_with('.')) name.remove_prefix(1);
  if (name.ends_with('.')) name.remove_suffix(1);
  return name;
}

bool is_in_domain(std::string_view host, std::string_view domain) noexcept {
  domain = without_dots(domain);
  if (domain.empty() || host.size() < domain.size()) return false;
  const std::string_view tail = host.substr(host.size() - domain.size());
  const bool is_equal = std::ranges::equal(tail, domain, [](unsigned char a, unsigned char b) {
    return std::tolower(a) == std::tolower(b);
  });
  return is_equal && (tail.size() == host.size() || host[host.size() - domain.size() - 1] == '.');
}

}  // namespace

bool is_without_proxy(std::string_view host, std::string_view list) {
  constexpr std::string_view separators = ", \t";
  const auto address = address_of(host);
  host = without_dots(host);
  while (!list.empty()) {
    const std::size_t end = std::min(list.find_first_of(separators), list.size());
    const std::string_view entry = list.substr(0, end);
    list.remove_prefix(std::min(end + 1, list.size()));
    if (entry == "*") return true;
    if (address ? is_in_network(*address, entry) : is_in_domain(host, entry)) return true;
  }
  return false;
}

}  // namespace loadstone
