// Declares the encoders and decoders of bitsandbytes: nf4 and fp4 (blocks with one scale each),
// nested scales (the scales of blocks as 8-bit codes) and LLM.int8 (rows with one scale each).
// docs/formats/bitsandbytes.md specifies the bytes.
//
// All functions are thread-safe and give the same bytes on every instruction set, and for any
// division of a tensor into windows. Pointers need no alignment; input and output must not overlap.
// Every NaN is written as the quiet NaN with payload 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "loadstone/dtype.h"

namespace loadstone {

// bitsandbytes' CPU and CUDA code round ties, sign zeros and encode all-zero blocks differently.
enum class BnbDialect : std::uint8_t { cpu, cuda };
enum class Bnb4Code : std::uint8_t { nf4, fp4 };

struct Bnb4 {
  Bnb4Code code = Bnb4Code::nf4;
  BnbDialect dialect = BnbDialect::cpu;
  std::uint32_t block_size = 64;  // see is_bnb_block_size()
};

// Returns true for the powers of two from 32 to 4096.
[[nodiscard]] bool is_bnb_block_size(std::uint64_t size) noexcept;

// The values of the 16 codes. A checkpoint stores this table as "quant_map".
[[nodiscard]] std::span<const float, 16> bnb4_values(Bnb4Code code) noexcept;
// The values of the 256 codes of nested scales, ascending. A checkpoint stores this table as
// "nested_quant_map".
[[nodiscard]] std::span<const float, 256> bnb_dynamic_map() noexcept;

// Number of block scales that share one nested scale.
inline constexpr std::uint32_t bnb_nested_block_size = 256;

// Encodes `count` F32, F16 or BF16 values to (count + 1) / 2 bytes of `data` and one F32 of
// `absmax` per block. A window consists of whole blocks, except that the last block of the tensor
// may be short. Returns the index of the first non-finite value, or `count`. The block of a
// non-finite value is still written.
std::uint64_t encode_bnb4(const Bnb4& form, Dtype source, const std::byte* numbers,
                          std::uint64_t count, std::byte* data, std::byte* absmax) noexcept;

// Decodes the values [begin, end) of a tensor to F32, F16 or BF16. `data` begins with the byte that
// contains value `begin`, and `absmax` (F32) with the scale of that value's block. Blocks may cross
// rows. Both dialects decode alike.
void decode_bnb4(const Bnb4& form, std::uint64_t begin, std::uint64_t end, const std::byte* data,
                 const std::byte* absmax, Dtype target, std::byte* numbers) noexcept;

// Returns the mean of all `count` scales, which are summed in order in F64; rounds once.
[[nodiscard]] float bnb_nested_offset(const std::byte* absmax, std::uint64_t count) noexcept;

// Encodes scales to one byte each and one F32 of `nested_absmax` per 256 scales. The scales and
// `offset` must be finite. `most`: the largest scale that is finite in the dtype of the values; no
// scale may exceed it. No code decodes to more than `most`.
void encode_bnb_nested(BnbDialect dialect, const std::byte* absmax, std::uint64_t count,
                       float offset, float most, std::byte* data,
                       std::byte* nested_absmax) noexcept;

// Decodes the scales [begin, end). `data` starts with the code of scale `begin`, and
// `nested_absmax` with the value of the block that contains this scale. `map`: 256 F32.
void decode_bnb_nested(std::uint64_t begin, std::uint64_t end, const std::byte* data,
                       const std::byte* nested_absmax, const std::byte* map, float offset,
                       std::byte* absmax) noexcept;

// Casts whole rows of F32, F16 or BF16 to F16, then encodes them to I8 and one F32 of `absmax` per
// row. Returns the index of the first value that is not finite in F16, or rows * columns.
std::uint64_t encode_bnb_int8(BnbDialect dialect, Dtype source, const std::byte* numbers,
                              std::uint64_t rows, std::uint64_t columns, std::byte* data,
                              std::byte* absmax) noexcept;

// Decodes the elements [begin, end) of a matrix to F32, F16 or BF16. `data` starts with the code of
// element `begin`, and `absmax` with the scale of its row.
void decode_bnb_int8(std::uint64_t begin, std::uint64_t end, std::uint64_t columns,
                     const std::byte* data, const std::byte* absmax, Dtype target,
                     std::byte* numbers) noexcept;

}  // namespace loadstone
