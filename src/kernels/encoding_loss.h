// Compares values with the values that their codes decode to.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/quantize.h"

namespace loadstone {

// Returns the number of elements of `matrix_errors`.
[[nodiscard]] std::uint64_t compared_matrices(const QuantizedLayout& form) noexcept;

// Adds the blocks of the window [begin, end) to `loss`. `decoded`: the values of the window's
// codes. If blocks are matrices (fp8), raises `matrix_errors` instead, because a matrix may have
// several windows.
void compare_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                    const float* values, const float* decoded, std::span<float> matrix_errors,
                    EncodingLoss& loss) noexcept;

// Adds the blocks of a window whose codes did not change, except those of matrices (fp8).
void count_exact_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                        EncodingLoss& loss) noexcept;

// Counts blocks of the window whose codes represent only 0 although a value of the block is not 0.
// `numbers`: the values, in form.dtype. `parts`: see quantize_window(). Returns 0 for encodings
// whose scales have the range of F32.
[[nodiscard]] std::uint64_t count_zeroed_blocks(const QuantizedLayout& form, std::uint64_t begin,
                                                std::uint64_t end, const std::byte* numbers,
                                                std::span<std::byte* const> parts) noexcept;

// Adds the matrices to `loss`, after all their windows. `amax`: see measure_window().
void count_matrices(std::span<const float> matrix_errors, std::span<const float> amax,
                    EncodingLoss& loss) noexcept;

}  // namespace loadstone
