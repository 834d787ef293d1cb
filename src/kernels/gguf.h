// Blocks of GGUF formats to plain numbers, and back. docs/formats/gguf-blocks.md says what the
// blocks hold, and how encoders choose scales and codes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "loadstone/dtype.h"

namespace loadstone {

// exact: each number as F32, with every bit that gguf-py gives, then one rounding to the dtype.
// half: the arithmetic of a program that computes in F16 and rounds each product and each sum; it
// knows fewer formats.
enum class GgufMode : std::uint8_t { exact, half };

// Decodes `block_count` blocks that stand one after the other. Pointers need no alignment; source
// and target must not overlap. Thread-safe; the same bytes on every instruction set.
//
// A NaN has the bits that the references give on x86-64: the payload of the scale or the offset
// that was one, quiet, and without one 0xffc00000.
using DecodeBlocks = void (*)(const std::byte* blocks, std::uint64_t block_count,
                              std::byte* target) noexcept;

// For the best instruction set of this machine. Null for targets other than F32, BF16 and F16; for
// Q8_1 and Q8_K, which hold activations on their way, appear in no file and have no reference; and
// where the mode does not know the format: half has Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL and IQ4_XS.
[[nodiscard]] DecodeBlocks gguf_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept;

// How much the numbers of a row weigh in its scales.
struct BlockImportance {
  const float* numbers = nullptr;  // one for each number that is encoded, finite and not negative
  float mean_square = 0;           // of the whole row, where the format asks for it
};

// Encodes `block_count` blocks of finite numbers that stand one after the other; those of one row
// where there is an importance, which may be null unless the format needs one. The bytes are those
// of ggml's reference, compiled without fused multiply-adds, on x86-64. Numbers are aligned as
// floats; `blocks` need no alignment. Thread-safe; the same bytes on every instruction set, and
// however rows are cut between blocks.
using EncodeBlocks = void (*)(const float* numbers, std::uint64_t block_count,
                              const BlockImportance* importance, std::byte* blocks) noexcept;

// For the best instruction set of this machine. Null where numbers are not encoded to the format.
[[nodiscard]] EncodeBlocks gguf_encoder(BlockFormat format) noexcept;

// Whether the format's blocks ask for the mean square of the row beside an importance.
[[nodiscard]] constexpr bool asks_for_row(BlockFormat format) noexcept {
  return format <= BlockFormat::q5_1;
}

// Whether numbers are encoded with an importance only, as ggml has it.
[[nodiscard]] constexpr bool needs_importance(BlockFormat format) noexcept {
  return format == BlockFormat::iq2_xxs || format == BlockFormat::iq2_xs ||
         format == BlockFormat::iq1_s;
}

}  // namespace loadstone
