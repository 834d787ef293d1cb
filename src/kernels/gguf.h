// Blocks of GGUF formats to plain numbers. docs/formats/gguf-blocks.md says what the blocks hold.
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

}  // namespace loadstone
