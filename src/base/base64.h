// Encodes bytes as base64 (RFC 4648, with padding) for JSON, and decodes them.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

[[nodiscard]] std::string base64_from(std::span<const std::byte> bytes);

// Returns nullopt for a string that base64_from() would not write.
[[nodiscard]] std::optional<std::vector<std::byte>> bytes_from_base64(std::string_view text);

}  // namespace loadstone
