// Declares the address of a remote file: the URL to request, and the path to show.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace loadstone {

inline constexpr std::size_t shown_bytes_max = 400;  // length of a location in a message

enum class Signing : std::uint8_t { none, bearer, aws };

struct Address {
  std::string path;        // shown in catalogs, plans and messages
  std::string url;         // without secrets
  std::string query = {};  // begins with '?'; may contain a secret
  Signing signing = Signing::none;

  [[nodiscard]] std::string full_url() const { return url + query; }
};

}  // namespace loadstone
