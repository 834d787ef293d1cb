// Returns the decoders and encoders of GGUF formats. Each family of formats has its own file; its
// functions return null for formats of other families.
#pragma once

#include "kernels/gguf.h"

namespace loadstone::simd {

// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
[[nodiscard]] DecodeBlocks legacy_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept;
// Q2_K to Q6_K.
[[nodiscard]] DecodeBlocks k_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept;
// IQ4_NL, IQ4_XS, MXFP4, NVFP4: four-bit codes, which are indices into a table of values.
[[nodiscard]] DecodeBlocks table_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept;
// IQ1, IQ2 and IQ3: codes are indices into a grid of points.
[[nodiscard]] DecodeBlocks grid_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept;
// TQ1_0, TQ2_0, Q1_0, Q2_0.
[[nodiscard]] DecodeBlocks low_bit_decoder(BlockFormat format, Dtype target,
                                           GgufMode mode) noexcept;

// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
[[nodiscard]] EncodeBlocks legacy_encoder(BlockFormat format) noexcept;
// Q2_K to Q6_K.
[[nodiscard]] EncodeBlocks k_encoder(BlockFormat format) noexcept;
// IQ4_NL, IQ4_XS, MXFP4.
[[nodiscard]] EncodeBlocks table_encoder(BlockFormat format) noexcept;
// IQ2 and IQ3.
[[nodiscard]] EncodeBlocks grid_encoder(BlockFormat format) noexcept;
// IQ1_S, IQ1_M.
[[nodiscard]] EncodeBlocks iq1_encoder(BlockFormat format) noexcept;
// TQ1_0, TQ2_0.
[[nodiscard]] EncodeBlocks low_bit_encoder(BlockFormat format) noexcept;

}  // namespace loadstone::simd
