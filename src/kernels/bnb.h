// The formats of bitsandbytes, both ways: nf4 and fp4 in blocks with one scale each, the scales
// themselves in 8 bits ("nested"), and LLM.int8 by rows. docs/formats/bitsandbytes.md says what the
// bytes mean.
//
// All functions are thread-safe and give the same bytes on every instruction set, and however a
// tensor is cut into windows. Pointers need no alignment; what is read and what is written must not
// overlap. NaNs are written as the plain quiet NaN.
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

// What the 16 codes stand for, by code; in a checkpoint this is "quant_map".
[[nodiscard]] std::span<const float, 16> bnb4_values(Bnb4Code code) noexcept;
// The same for scales in 8 bits ("nested_quant_map"), ascending.
[[nodiscard]] std::span<const float, 256> bnb_dynamic_map() noexcept;

// How many scales are in one block of nested statistics.
inline constexpr std::uint32_t bnb_nested_block_size = 256;

// `count` numbers, F32, F16 or BF16, to (count + 1) / 2 bytes of `data` and one F32 of `absmax` a
// block. A window is any run of whole blocks, or of blocks up to the end of the tensor. Returns the
// place of the first number that is not finite, or `count`; its block is written all the same.
std::uint64_t encode_bnb4(const Bnb4& form, Dtype source, const std::byte* numbers,
                          std::uint64_t count, std::byte* data, std::byte* absmax) noexcept;

// The numbers [begin, end) of a tensor as F32, F16 or BF16. `data` begins with the byte of number
// `begin`, `absmax` (F32) with its block's. Rows do not matter, and dialects do not differ.
void decode_bnb4(const Bnb4& form, std::uint64_t begin, std::uint64_t end, const std::byte* data,
                 const std::byte* absmax, Dtype target, std::byte* numbers) noexcept;

// The mean of all `count` scales: summed one after the other in F64, rounded once.
[[nodiscard]] float bnb_nested_offset(const std::byte* absmax, std::uint64_t count) noexcept;

// Scales, finite as the offset is, to a byte each and one F32 of `nested_absmax` for each 256. No
// code gives more than `most`, above which scales are infinite in the dtype of the numbers; it is
// as large as each of the scales.
void encode_bnb_nested(BnbDialect dialect, const std::byte* absmax, std::uint64_t count,
                       float offset, float most, std::byte* data,
                       std::byte* nested_absmax) noexcept;

// The scales [begin, end): `data` begins with that of scale `begin`, `nested_absmax` with its
// block's. `map` holds 256 F32.
void decode_bnb_nested(std::uint64_t begin, std::uint64_t end, const std::byte* data,
                       const std::byte* nested_absmax, const std::byte* map, float offset,
                       std::byte* absmax) noexcept;

// Whole rows, F32, F16 or BF16, to I8 and one F32 of `absmax` a row. Numbers become F16 first.
// Returns the place of the first number that is not finite in F16, or rows * columns.
std::uint64_t encode_bnb_int8(BnbDialect dialect, Dtype source, const std::byte* numbers,
                              std::uint64_t rows, std::uint64_t columns, std::byte* data,
                              std::byte* absmax) noexcept;

// The numbers [begin, end) of a matrix as F32, F16 or BF16. `data` begins with that of `begin`,
// `absmax` with its row's.
void decode_bnb_int8(std::uint64_t begin, std::uint64_t end, std::uint64_t columns,
                     const std::byte* data, const std::byte* absmax, Dtype target,
                     std::byte* numbers) noexcept;

}  // namespace loadstone
