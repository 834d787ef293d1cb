// Writes codes that come from another encoding, without decoding them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/quantize.h"

namespace loadstone {

// Most values of a run.
inline constexpr std::uint64_t moved_values_max = 2048;
inline constexpr std::uint64_t moved_scales_max = moved_values_max / 16;

// Values of one row, in the form of Decoder::take_codes().
struct MovedRun {
  std::uint64_t begin = 0;  // the first element
  std::uint64_t count = 0;
  std::uint64_t per_scale = 1;
  const std::byte* codes = nullptr;
  const float* scales = nullptr;
  float outer = 1;  // scale of the source's matrix
};

// Returns true if write_codes() supports the encoding.
[[nodiscard]] bool holds_moved_codes(const QuantizedLayout& form) noexcept;

// Writes the blocks whose scales the encoding represents exactly. `parts` are those of a window
// that begins at the element `begin`, see quantize_window(). `matrix_scale`: the scale that
// finish_quantized() writes for the matrix. Returns true if all blocks were written.
bool write_codes(const QuantizedLayout& form, std::uint64_t begin, const MovedRun& run,
                 float matrix_scale, std::span<std::byte* const> parts) noexcept;

// Returns the index of the first code that is NaN, or the count.
[[nodiscard]] std::uint64_t find_nan_code(const QuantizedLayout& form,
                                          const MovedRun& run) noexcept;

}  // namespace loadstone
