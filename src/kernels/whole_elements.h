#pragma once

#include <cstdint>

namespace loadstone {

// Ranges of numbers that begin and end at multiples of it cut no block of any encoding.
inline constexpr std::uint64_t whole_elements = 256;

}  // namespace loadstone
