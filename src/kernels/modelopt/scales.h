// How many numbers share a scale in ModelOpt's encodings, and what the scale is.
#pragma once

#include <cstdint>

#include "kernels/quantize.h"

namespace loadstone::scaled {

inline constexpr std::uint64_t nvfp4_block = 16;

// Of those encodings whose rows end with a block, which may be a short one.
[[nodiscard]] constexpr std::uint64_t blocks_of_row(const QuantizeForm& form) noexcept {
  return (form.columns + nvfp4_block - 1) / nvfp4_block;
}

// `value` as the dtype has it.
[[nodiscard]] float rounded(Dtype dtype, float value) noexcept;

// A scale that would be 0 is 1: all that it scales is 0.
[[nodiscard]] float fp8_scale(const QuantizeForm& form, float amax) noexcept;
[[nodiscard]] float nvfp4_scale_2(float amax) noexcept;

}  // namespace loadstone::scaled
