// Computes SHA-256, for tests that compare documented tables with a known hash.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace loadstone::test {

// Returns all 64 hex digits.
[[nodiscard]] std::string sha256(std::span<const std::byte> bytes);

}  // namespace loadstone::test
