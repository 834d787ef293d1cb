// The formats of bitsandbytes, in both directions: nf4 and fp4 in blocks with one scale each,
// scales in 8 bits ("nested"), and LLM.int8 by rows. docs/formats/bitsandbytes.md specifies the
// bytes.
//
// All functions are thread-safe and give the same bytes on every instruction set, and for any
// division of a tensor into windows. Pointers need no alignment; input and output must not overlap.
// NaNs are written as the plain quiet NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "loadstone/dtype.h"

namespace loadstone {

// bitsandbytes' processors do not agree on ties, signs of zero and empty blocks.
enum class BnbDialect : std::uint8_t { cpu, cuda };
enum class Bnb4Code : std::uint8_t { nf4, fp4 };

struct Bnb4 {
  Bnb4Code code = Bnb4Code::nf4;
  BnbDialect dialect = BnbDialect::cpu;
  std::uint32_t block_size = 64;  // see is_bnb_block_size()
};

// 32, 64, 128 ... 4096.
[[nodiscard]] bool is_bnb_block_size(std::uint64_t size) noexcept;

// Values of the 16 codes; in a checkpoint this is "quant_map".
[[nodiscard]] std::span<const float, 16> bnb4_values(Bnb4Code code) noexcept;
// Values of the 256 codes of nested scales ("nested_quant_map"), ascending.
[[nodiscard]] std::span<const float, 256> bnb_dynamic_map() noexcept;

// Scales per block of nested statistics.
inline constexpr std::uint32_t bnb_nested_block_size = 256;

// Encodes `count` F32, F16 or BF16 values to (count + 1) / 2 bytes of `data` and one F32 of
// `absmax` per block. A window is any run of whole blocks, or of blocks up to the end of the
// tensor. Returns the index of the first non-finite value, or `count`; its block is still written.
std::uint64_t encode_bnb4(const Bnb4& form, Dtype source, const std::byte* numbers,
                          std::uint64_t count, std::byte* data, std::byte* absmax) noexcept;

// Decodes the values [begin, end) of a tensor to F32, F16 or BF16. `data` begins with the byte of
// value `begin`, `absmax` (F32) with its block's. Rows do not matter, and dialects do not differ.
void decode_bnb4(const Bnb4& form, std::uint64_t begin, std::uint64_t end, const std::byte* data,
                 const std::byte* absmax, Dtype target, std::byte* numbers) noexcept;

// The mean of all `count` scales: summed one after the other in F64, rounded once.
[[nodiscard]] float bnb_nested_offset(const std::byte* absmax, std::uint64_t count) noexcept;

// Encodes scales, finite like the offset, to a byte each and one F32 of `nested_absmax` per 256. No
// code decodes to more than `most`, above which scales are infinite in the dtype of the values; it
// is at least as large as each of the scales.
void encode_bnb_nested(BnbDialect dialect, const std::byte* absmax, std::uint64_t count,
                       float offset, float most, std::byte* data,
                       std::byte* nested_absmax) noexcept;

// Decodes the scales [begin, end): `data` starts with the code of scale `begin`, `nested_absmax`
// with the value of the block that contains it. `map`: 256 F32.
void decode_bnb_nested(std::uint64_t begin, std::uint64_t end, const std::byte* data,
                       const std::byte* nested_absmax, const std::byte* map, float offset,
                       std::byte* absmax) noexcept;

// Encodes whole rows of F32, F16 or BF16 to I8 and one F32 of `absmax` per row, after a cast to
// F16. Returns the index of the first value that is not finite in F16, or rows * columns.
std::uint64_t encode_bnb_int8(BnbDialect dialect, Dtype source, const std::byte* numbers,
                              std::uint64_t rows, std::uint64_t columns, std::byte* data,
                              std::byte* absmax) noexcept;

// Decodes the elements [begin, end) of a matrix as F32, F16 or BF16. `data` starts with that of
// `begin`, `absmax` with its row's.
void decode_bnb_int8(std::uint64_t begin, std::uint64_t end, std::uint64_t columns,
                     const std::byte* data, const std::byte* absmax, Dtype target,
                     std::byte* numbers) noexcept;

}  // namespace loadstone
