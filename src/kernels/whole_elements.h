#pragma once

#include <cstdint>

namespace loadstone {

// Ranges that begin and end at multiples of it split no block of any encoding.
inline constexpr std::uint64_t whole_elements = 256;

}  // namespace loadstone
