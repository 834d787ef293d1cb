// Shared by kernels that decode and those that encode.
#pragma once

#include <cstdint>
#include <string>

namespace loadstone {

// Ranges of numbers that begin and end at multiples of it cut no block of any encoding.
inline constexpr std::uint64_t whole_elements = 256;

// Why a kernel cannot be used.
struct DecodeProblem {
  std::string message;
  std::string found;
  std::string expected;
};

}  // namespace loadstone
