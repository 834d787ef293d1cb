// Bytes as text in JSON: base64 of RFC 4648 with padding.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

[[nodiscard]] std::string base64_from(std::span<const std::byte> bytes);

// nullopt for text that base64_from() would not write.
[[nodiscard]] std::optional<std::vector<std::byte>> bytes_from_base64(std::string_view text);

}  // namespace loadstone
