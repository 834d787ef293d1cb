// Quantized weights and their scales to plain numbers, with the bits that torch and transformers
// give: each number and its scale as F32, their product, one rounding to the wanted dtype; and the
// blocks of GGUF, which hold their scales.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "kernels/bnb.h"
#include "kernels/gguf.h"
#include "loadstone/dtype.h"
#include "loadstone/shape.h"

namespace loadstone {

// Ranges of numbers that begin and end at multiples of it cut no block of any encoding.
inline constexpr std::uint64_t whole_elements = 256;

// What a kernel is given: first the weights, then the scales, then tables.
struct DecodePart {
  Encoding encoding = Dtype::u8;
  Shape shape;
};

// Why a kernel cannot be used.
struct DecodeProblem {
  std::string message;
  std::string found;
  std::string expected;
};

// How the elements of the result are made, all of them numbered row by row. A matrix of the result
// is cut into blocks, each with one scale. Value type.
struct DecodeForm {
  Dtype weight = Dtype::f8_e4m3;  // u8: two numbers of 4 bits a byte, the low one first
  Dtype scale = Dtype::f32;       // u8: the byte's power of two
  Dtype dtype = Dtype::f32;       // of the result
  bool by_exponent = false;       // a scale is added to the exponent: 2^128 too, which no F32 is
  std::uint64_t elements = 0;
  std::uint64_t matrix_elements = 1;
  std::uint64_t columns = 1;
  std::uint64_t block_rows = 1;
  std::uint64_t block_columns = 1;
  std::uint64_t scale_columns = 1;
  std::uint64_t scale_count = 1;    // of all scales
  std::uint64_t matrix_scales = 0;  // scales of one matrix; 0: all matrices share them
  // Blocks that hold their scales: `scale_bytes()` is empty, and of the above only `dtype` and
  // `elements` mean anything. Null with `block_bytes` > 0: the bytes are the result.
  DecodeBlocks blocks = nullptr;
  BlockLayout block = {.elements = 0, .bytes = 0};
  // nvfp4: every scale is multiplied with (or divided by) a third part, F32, one of all matrices or
  // one of each.
  enum class Global : std::uint8_t { none, factor, divisor };
  Global global = Global::none;
  std::uint64_t global_count = 1;
  // ModelOpt's integers of 4 bits: offset by 8 with the high half of a byte first and inverse
  // scales; or in two's complement, the low halves of bytes one row and the high ones the next.
  enum class Int4 : std::uint8_t { none, blocks, row_pairs };
  Int4 int4 = Int4::none;
  // bitsandbytes: of the above only `dtype`, `elements` and `columns` mean anything.
  enum class Bnb : std::uint8_t { none, blocks, nested_blocks, rows };
  Bnb bnb = Bnb::none;
  Bnb4 bnb4;
  float offset = 0;  // added to nested scales
  static constexpr std::size_t parts_max = 4;

  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    [[nodiscard]] std::uint64_t size() const noexcept { return end - begin; }
  };
  // Bytes of the weights, and of the scales, that the elements [begin, end) need; at least one.
  [[nodiscard]] Range weight_bytes(std::uint64_t begin, std::uint64_t end) const noexcept;
  [[nodiscard]] Range scale_bytes(std::uint64_t begin, std::uint64_t end) const noexcept;
  // Of any part: after weights and scales come global scales or nested statistics, then their code.
  // Nothing of those that there are not.
  [[nodiscard]] Range part_bytes(std::size_t part, std::uint64_t begin,
                                 std::uint64_t end) const noexcept;
};

// The part of `decode()` and its kin for blocks that hold their scales.
[[nodiscard]] bool decodes_blocks(std::string_view kernel) noexcept;
[[nodiscard]] std::optional<DecodeProblem> prepare_block_format(std::string_view kernel,
                                                                const DecodePart& part,
                                                                const Shape& shape, Dtype dtype,
                                                                DecodeForm& form);
void decode_block_format(const DecodeForm& form, std::uint64_t begin, std::uint64_t end,
                         const std::byte* blocks, std::byte* target) noexcept;

// The same for weights of bitsandbytes.
[[nodiscard]] bool decodes_bnb(std::string_view kernel) noexcept;
[[nodiscard]] std::optional<DecodeProblem> prepare_bnb(std::string_view kernel,
                                                       std::span<const DecodePart> parts,
                                                       const Shape& shape, Dtype dtype,
                                                       float offset, DecodeForm& form);
[[nodiscard]] DecodeForm::Range bnb_part_bytes(const DecodeForm& form, std::size_t part,
                                               std::uint64_t begin, std::uint64_t end) noexcept;
void decode_bnb(const DecodeForm& form, std::uint64_t begin, std::uint64_t end,
                std::span<const std::byte* const> parts, std::byte* target) noexcept;

// Kernels: "fp8_block" (weights F8_E4M3 or F8_E5M2 [..., rows, columns], scales F32, BF16, F16,
// F8_E8M0 or U8 [..., rows / n, columns / m], or one of them), "fp8_block_128" (the same with
// blocks of 128 by 128, of which the last may be cut), "fp8_rows" and "int8_rows" (scales [...,
// rows] or
// [..., rows, 1]; I8), "fp4_block" (as fp8_block with I8 or U8 of two numbers each), "nvfp4" (U8
// [..., columns / 2], F8_E4M3 [..., columns / 16], F32 that is multiplied with the scales: one, or
// one a matrix) and "nvfp4_divided" (the scales are divided by it), "mxfp4" (U8 [..., groups, 16],
// U8 [..., groups]; the result has [..., groups * 32]), "int4_blocks" (U8 [..., columns / 2],
// inverse scales F32, F16 or BF16 [..., blocks, 1] of 128 numbers each) and "int4_row_pairs" (U8
// [..., rows / 2, columns], F32 [..., rows, columns / 128]); with one part "gguf" (exact) and
// "gguf_half" (F16 arithmetic) for block formats, and "bytes" (their rows as U8 [..., bytes]). Of
// bitsandbytes: "bnb_nf4" and "bnb_fp4" (packed bytes, F32 absmax; or U8 absmax, F32 nested_absmax,
// F32 nested_code [256], to which `offset` is added), "bnb_int8" (I8, F32 absmax). Fills in `form`
// and returns nothing, or says what does not fit.
[[nodiscard]] std::optional<DecodeProblem> prepare_decoding(std::string_view kernel,
                                                            std::span<const DecodePart> parts,
                                                            const Shape& shape, Dtype dtype,
                                                            float offset, DecodeForm& form);

// Writes the elements [begin, end) to `target`. `parts` hold the bytes that part_bytes() names;
// null where there are none. Thread-safe; the same bytes however the elements are cut.
void decode(const DecodeForm& form, std::uint64_t begin, std::uint64_t end,
            std::span<const std::byte* const> parts, std::byte* target) noexcept;

}  // namespace loadstone
