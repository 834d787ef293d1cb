// The host to ask for a file, and the path to show for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace loadstone {

inline constexpr std::size_t shown_bytes_max = 400;  // of a location in a message

enum class Signing : std::uint8_t { none, bearer, aws };

struct Address {
  std::string path;        // for catalogs, plans and messages
  std::string url;         // without secrets
  std::string query = {};  // with its '?'; may be a secret
  Signing signing = Signing::none;

  [[nodiscard]] std::string full_url() const { return url + query; }
};

}  // namespace loadstone
