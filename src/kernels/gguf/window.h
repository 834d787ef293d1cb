// Windows of a value as blocks of GGUF.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/quantize.h"

namespace loadstone {

// A window is whole blocks, and where the form has an importance whole rows. Returns the place of
// the first number that is not finite, or `end`: NaN counts as 0 and an infinity as the largest
// finite magnitude of its block.
std::uint64_t encode_gguf_window(const QuantizedLayout& form, std::uint64_t begin,
                                 std::uint64_t end, const std::byte* numbers,
                                 std::byte* blocks) noexcept;
void decode_gguf_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                        const std::byte* blocks, Dtype target, std::byte* numbers) noexcept;

}  // namespace loadstone
