// Windows of a value as blocks of GGUF.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/quantize.h"

namespace loadstone {

// A window is whole blocks, and with an importance whole rows. Returns the index of the first
// non-finite value, or `end`: NaN counts as 0 and an infinity as the largest finite magnitude of
// its block.
std::uint64_t encode_gguf_window(const QuantizedLayout& form, std::uint64_t begin,
                                 std::uint64_t end, const std::byte* numbers,
                                 std::byte* blocks) noexcept;
void decode_gguf_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                        const std::byte* blocks, Dtype target, std::byte* numbers) noexcept;

}  // namespace loadstone
