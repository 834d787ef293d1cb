// SHA-256, for values that a document pins by it.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace loadstone::test {

// All 64 hex digits.
[[nodiscard]] std::string sha256(std::span<const std::byte> bytes);

}  // namespace loadstone::test
