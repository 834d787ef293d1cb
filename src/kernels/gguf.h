// Blocks of GGUF formats to plain values and back. docs/formats/gguf-blocks.md specifies the
// blocks, and how encoders choose scales and codes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "loadstone/dtype.h"

namespace loadstone {

// exact: each value as F32, equal to gguf-py's in every bit, then one rounding to the dtype. half:
// the arithmetic of a program that computes in F16 and rounds each product and each sum; it
// supports fewer formats. knows fewer formats.
enum class GgufMode : std::uint8_t { exact, half };

// Decodes `block_count` consecutive blocks. Pointers need no alignment; source and target must not
// overlap. Thread-safe; the same bytes on every instruction set.
//
// A NaN has the bits of the references on x86-64: the quieted payload of the scale or offset that
// was NaN, otherwise 0xffc00000. that was one, quiet, and without one 0xffc00000.
using DecodeBlocks = void (*)(const std::byte* blocks, std::uint64_t block_count,
                              std::byte* target) noexcept;

// The decoder for the best instruction set of this machine. Null for targets other than F32, BF16
// and F16; for Q8_1 and Q8_K, which are for activations, appear in no file and have no reference;
// and for formats that the mode does not support: half has Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL and
// IQ4_XS.
[[nodiscard]] DecodeBlocks gguf_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept;

// Weights of a row's elements, for choosing scales.
struct BlockImportance {
  const float* numbers = nullptr;  // one for each number that is encoded, finite and not negative
  float mean_square = 0;           // of the whole row, if the format needs it
};

// Encodes `block_count` consecutive blocks of finite values; blocks of one row if there is an
// importance, which may be null unless the format needs one. The bytes are those of ggml's
// reference, compiled without fused multiply-adds, on x86-64. Values are aligned as floats;
// `blocks` need no alignment. Thread-safe; the same bytes on every instruction set, and for any
// division of rows between blocks.
using EncodeBlocks = void (*)(const float* numbers, std::uint64_t block_count,
                              const BlockImportance* importance, std::byte* blocks) noexcept;

// The encoder for the best instruction set of this machine. Null if the format has no encoder.
[[nodiscard]] EncodeBlocks gguf_encoder(BlockFormat format) noexcept;

// Returns true if the format needs the mean square of the row in addition to an importance.
[[nodiscard]] constexpr bool asks_for_row(BlockFormat format) noexcept {
  return format <= BlockFormat::q5_1;
}

// Returns true if the format is encoded only with an importance, as in ggml.
[[nodiscard]] constexpr bool needs_importance(BlockFormat format) noexcept {
  return format == BlockFormat::iq2_xxs || format == BlockFormat::iq2_xs ||
         format == BlockFormat::iq1_s;
}

}  // namespace loadstone
