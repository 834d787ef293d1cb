// Encodes windows of a tensor as blocks of GGUF.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/quantize.h"

namespace loadstone {

// Encodes [begin, end). A window consists of whole blocks, and of whole rows if there is an
// importance. Returns the index of the first non-finite value, or `end`. Encodes a NaN as 0, and an
// infinity as the largest finite magnitude of its block, with the infinity's sign.
std::uint64_t encode_gguf_window(const QuantizedLayout& form, std::uint64_t begin,
                                 std::uint64_t end, const std::byte* numbers,
                                 std::byte* blocks) noexcept;
void decode_gguf_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                        const std::byte* blocks, Dtype target, std::byte* numbers) noexcept;

}  // namespace loadstone
