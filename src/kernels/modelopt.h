// Encodes and decodes the formats of NVIDIA ModelOpt, and the OCP's MX formats as ModelOpt writes
// them. docs/formats/modelopt.md specifies the bytes.
//
// Declares kernels for runs of values, and functions that divide whole tensors into such runs. All
// are thread-safe and give the same bytes on every instruction set. Pointers need no alignment;
// input and output must not overlap. Encoders return the index of the first non-finite value, or
// the count. They encode a NaN as 0 (as NaN in F8_E4M3) and an infinity as the largest value, and
// ignore both in scales. Scales are finite and positive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/quantize.h"

namespace loadstone {

// ---- Kernels. `source` is F32, F16 or BF16

// Raises `amax` to the largest finite magnitude. Returns the index of the first non-finite value,
// or `count`.
std::uint64_t join_amax(Dtype source, const std::byte* numbers, std::uint64_t count,
                        float& amax) noexcept;

// A run of values that share a scale. Encodes each quotient value / scale as F8_E4M3 or I8.
struct ScaledRun {
  Dtype source = Dtype::f32;
  bool is_int8 = false;
  bool rounds = false;  // true if the quotient is first rounded to `source`
  float scale = 1;
};
std::uint64_t encode_bytes(const ScaledRun& run, const std::byte* numbers, std::uint64_t count,
                           std::byte* data) noexcept;
void decode_bytes(bool is_int8, float scale, const std::byte* data, std::uint64_t count,
                  Dtype target, std::byte* numbers) noexcept;

// Encodes one row: (columns + 15) / 16 scales, and 8 bytes of data per scale. Zeros follow the last
// value.
std::uint64_t encode_nvfp4(Dtype source, float scale_2, const std::byte* numbers,
                           std::uint64_t columns, std::byte* data, std::byte* scales) noexcept;

// Encodes whole blocks of 32. `is_rounded_log`: see mx_exponent().
std::uint64_t encode_mxfp4(Dtype source, bool is_rounded_log, const std::byte* numbers,
                           std::uint64_t count, std::byte* data, std::byte* scales) noexcept;
// Encodes one row: (columns + 31) / 32 scales. `is_rounded_log`: see mx_exponent().
std::uint64_t encode_mxfp8(Dtype source, bool is_rounded_log, const std::byte* numbers,
                           std::uint64_t columns, std::byte* data, std::byte* scales) noexcept;

// Encodes whole blocks of 128. If `rounds`, scales and products are rounded to `source`, and scales
// are stored in this dtype. Otherwise scales are F32.
std::uint64_t encode_int4(Dtype source, bool rounds, const std::byte* numbers, std::uint64_t count,
                          std::byte* data, std::byte* scales) noexcept;
// Encodes two rows, each of whole blocks of 128, and the F32 scales of both rows.
std::uint64_t encode_int4_rows(Dtype source, const std::byte* numbers, std::uint64_t columns,
                               std::byte* data, std::byte* scales) noexcept;

// Encodes whole groups of 32 or 128, with the arithmetic of compressed-tensors: scales and
// quotients are rounded to `source`, which is also the dtype of the stored scales. The first code
// of a byte is in the low bits, and codes are offset by 8.
std::uint64_t encode_int4_groups(Dtype source, std::uint64_t group_size, const std::byte* numbers,
                                 std::uint64_t count, std::byte* data, std::byte* scales) noexcept;

// Encodings of 4-bit codes.
// e2m1: value = code * scale; the first code of a byte is in the low bits.
// offset: value = (code - 8) / inverse scale; the first code of a byte is in the high bits.
// packed: value = (code - 8) * scale; the first code of a byte is in the low bits.
// twos: value = code in two's complement * scale; only decode_int4_rows() supports it.
enum class FourBit : std::uint8_t { e2m1, offset, packed, twos };
// Decodes the values [begin, end), which share a scale. `data` begins with the byte that contains
// value `begin`. `type` must not be twos.
void decode_four_bit(FourBit type, float scale, const std::byte* data, std::uint64_t begin,
                     std::uint64_t end, Dtype target, std::byte* numbers) noexcept;
// Decodes `count` bytes, each with one value of two rows: `upper` scales the first row, `lower` the
// second.
void decode_int4_rows(float upper, float lower, const std::byte* data, std::uint64_t count,
                      Dtype target, std::byte* first, std::byte* second) noexcept;

// ---- Whole tensors. See the functions of the same purpose in quantize.h

// Statistics of the matrices of a stack: see measure_window() and exact_matrix_scale().
struct MatrixStatistics {
  std::span<const float> amax;
  std::span<const float> exact;
};

void scaled_part_ranges(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                        std::span<PartRange> ranges) noexcept;
std::uint64_t encode_scaled_window(const QuantizedLayout& form, std::uint64_t begin,
                                   std::uint64_t end, const std::byte* numbers,
                                   std::span<std::byte* const> parts,
                                   const MatrixStatistics& matrices) noexcept;
void finish_scaled(const QuantizedLayout& form, std::span<std::byte* const> parts,
                   const MatrixStatistics& matrices) noexcept;

void decode_scaled_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                          std::span<const std::byte* const> parts, Dtype target,
                          std::byte* numbers) noexcept;

}  // namespace loadstone
