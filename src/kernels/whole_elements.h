#pragma once

#include <cstdint>

namespace loadstone {

// Multiples of this number of elements are whole blocks of every encoding.
inline constexpr std::uint64_t whole_elements = 256;

}  // namespace loadstone
