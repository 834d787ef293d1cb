// The longest receipt that is read.
#pragma once

#include <cstdint>

namespace loadstone {

// A longer one is rejected before it is read. A receipt of a million tensors has about 700 MB.
inline constexpr std::uint64_t receipt_json_bytes_max = std::uint64_t{1} << 30;

}  // namespace loadstone
