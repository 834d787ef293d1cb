// The formats of NVIDIA ModelOpt, and the OCP's MX formats as ModelOpt writes them, in both
// directions. docs/formats/modelopt.md specifies the bytes.
//
// Kernels for runs of values, and functions that prepare and divide whole tensors for them. All are
// thread-safe and give the same bytes on every instruction set. Pointers need no alignment; input
// and output must not overlap. Encoders return the index of the first non-finite value, or the
// count: NaN has the code of 0 (that of NaN in F8_E4M3), infinities have that of the largest value,
// and scales ignore both. Scales are finite and positive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/quantize.h"

namespace loadstone {

// ---- kernels: `source` is F32, F16 or BF16

// Updates `amax` with the largest finite magnitude.
std::uint64_t join_amax(Dtype source, const std::byte* numbers, std::uint64_t count,
                        float& amax) noexcept;

// Values with one scale, encoded as F8_E4M3 or I8 of the quotient.
struct ScaledRun {
  Dtype source = Dtype::f32;
  bool is_int8 = false;
  bool rounds = false;  // the quotient to `source` first
  float scale = 1;
};
std::uint64_t encode_bytes(const ScaledRun& run, const std::byte* numbers, std::uint64_t count,
                           std::byte* data) noexcept;
void decode_bytes(bool is_int8, float scale, const std::byte* data, std::uint64_t count,
                  Dtype target, std::byte* numbers) noexcept;

// One row: (columns + 15) / 16 scales and 8 bytes of data for each, zeros after the last number.
std::uint64_t encode_nvfp4(Dtype source, float scale_2, const std::byte* numbers,
                           std::uint64_t columns, std::byte* data, std::byte* scales) noexcept;

// Whole blocks of 32. `is_rounded_log`: the exponent is that of ModelOpt's logarithm in F32.
std::uint64_t encode_mxfp4(Dtype source, bool is_rounded_log, const std::byte* numbers,
                           std::uint64_t count, std::byte* data, std::byte* scales) noexcept;
// One row: (columns + 31) / 32 scales.
std::uint64_t encode_mxfp8(Dtype source, bool is_rounded_log, const std::byte* numbers,
                           std::uint64_t columns, std::byte* data, std::byte* scales) noexcept;

// Whole blocks of 128. `rounds`: scales and products to `source`, which is the dtype of the scales
// then; they are F32 else.
std::uint64_t encode_int4(Dtype source, bool rounds, const std::byte* numbers, std::uint64_t count,
                          std::byte* data, std::byte* scales) noexcept;
// Two rows of whole blocks of 128 each, and the scales of both, F32.
std::uint64_t encode_int4_rows(Dtype source, const std::byte* numbers, std::uint64_t columns,
                               std::byte* data, std::byte* scales) noexcept;

// E2M1, the first code low, times a scale; offset by 8, the first code high, by an inverse scale;
// two's complement.
enum class FourBit : std::uint8_t { e2m1, offset, twos };
// Decodes the values [begin, end), which share a scale; `data` begins with the byte of `begin`.
// Supports no twos.
void decode_four_bit(FourBit type, float scale, const std::byte* data, std::uint64_t begin,
                     std::uint64_t end, Dtype target, std::byte* numbers) noexcept;
// Bytes of two rows, each with its scale.
void decode_int4_rows(float upper, float lower, const std::byte* data, std::uint64_t count,
                      Dtype target, std::byte* first, std::byte* second) noexcept;

// ---- Whole tensors

void scaled_part_ranges(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                        std::span<PartRange> ranges) noexcept;
std::uint64_t encode_scaled_window(const QuantizedLayout& form, std::uint64_t begin,
                                   std::uint64_t end, const std::byte* numbers,
                                   std::span<std::byte* const> parts,
                                   std::span<const float> amax) noexcept;
void finish_scaled(const QuantizedLayout& form, std::span<std::byte* const> parts,
                   std::span<const float> amax) noexcept;

void decode_scaled_window(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                          std::span<const std::byte* const> parts, Dtype target,
                          std::byte* numbers) noexcept;

}  // namespace loadstone
