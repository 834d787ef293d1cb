// Decodes and encodes blocks of GGUF formats. docs/formats/gguf-blocks.md specifies the blocks, and
// how encoders choose scales and codes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "loadstone/dtype.h"

namespace loadstone {

// exact: computes each value in F32, equal to gguf-py in every bit, then rounds once to the dtype.
// half: computes in F16 and rounds each product and each sum, like a program that decodes in F16;
// supports fewer formats.
enum class GgufMode : std::uint8_t { exact, half };

// Decodes `block_count` consecutive blocks. Pointers need no alignment; source and target must not
// overlap. Thread-safe; the same bytes on every instruction set.
//
// A NaN has the same bits as in the reference decoders on x86-64: the quieted NaN of the scale or
// offset, or 0xffc00000 if neither is NaN.
using DecodeBlocks = void (*)(const std::byte* blocks, std::uint64_t block_count,
                              std::byte* target) noexcept;

// Returns the decoder for the best instruction set of this machine. Returns null
// - for targets other than F32, BF16 and F16;
// - for Q8_1 and Q8_K, which are formats of activations and occur in no file;
// - for formats that `mode` does not support: half supports Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL and
//   IQ4_XS.
[[nodiscard]] DecodeBlocks gguf_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept;

// Weights of the values of one row, which the choice of scales takes into account.
struct BlockImportance {
  const float* numbers = nullptr;  // a finite weight >= 0 for each encoded value
  float mean_square = 0;           // mean square of the row's values, if asks_for_row()
};

// Encodes `block_count` consecutive blocks of finite values. `importance` may be null unless the
// format needs one; with it, all blocks must belong to one row. The bytes equal those of ggml's
// reference code, compiled without fused multiply-adds, on x86-64. `numbers` must be aligned as
// floats; `blocks` need no alignment. Thread-safe; the same bytes on every instruction set, and for
// any division of a row into calls.
using EncodeBlocks = void (*)(const float* numbers, std::uint64_t block_count,
                              const BlockImportance* importance, std::byte* blocks) noexcept;

// Returns the encoder for the best instruction set of this machine, or null if the format has no
// encoder.
[[nodiscard]] EncodeBlocks gguf_encoder(BlockFormat format) noexcept;

// Returns true if the format needs the mean square of the row in addition to an importance.
[[nodiscard]] constexpr bool asks_for_row(BlockFormat format) noexcept {
  return format <= BlockFormat::q5_1;
}

// Returns true if the format can only be encoded with an importance, as in ggml.
[[nodiscard]] constexpr bool needs_importance(BlockFormat format) noexcept {
  return format == BlockFormat::iq2_xxs || format == BlockFormat::iq2_xs ||
         format == BlockFormat::iq1_s;
}

}  // namespace loadstone
