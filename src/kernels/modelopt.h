// The formats of NVIDIA ModelOpt, and the OCP's MX formats as it writes them, both ways.
// docs/formats/modelopt.md says what the bytes mean.
//
// Kernels for runs of numbers, and what prepares and cuts whole values for them. All are
// thread-safe and give the same bytes on every instruction set. Pointers need no alignment; what is
// read and what is written must not overlap. Encoders return the place of the first number that is
// not finite, or how many there are: NaN has the code of 0 (that of NaN in F8_E4M3), infinities
// have that of the largest number, and no scale takes either into account. Scales are finite and
// above 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "kernels/quantize.h"

namespace loadstone {

// ---- kernels: `source` is F32, F16 or BF16

// Joins the largest magnitude of what is finite to `amax`.
std::uint64_t join_amax(Dtype source, const std::byte* numbers, std::uint64_t count,
                        float& amax) noexcept;

// How numbers with one scale are encoded.
struct ScaledRun {
  Dtype source = Dtype::f32;
  bool rounds = false;  // the quotient to `source` first
  float scale = 1;
};
std::uint64_t encode_fp8(const ScaledRun& run, const std::byte* numbers, std::uint64_t count,
                         std::byte* data) noexcept;

// One row: (columns + 15) / 16 scales and 8 bytes of data for each, zeros after the last number.
std::uint64_t encode_nvfp4(Dtype source, float scale_2, const std::byte* numbers,
                           std::uint64_t columns, std::byte* data, std::byte* scales) noexcept;

// ---- whole values

// Nothing where the name is none of this family.
[[nodiscard]] std::optional<QuantizeKind> scaled_kind(std::string_view encoding) noexcept;

[[nodiscard]] std::optional<DecodeProblem> prepare_scaled(const Quantization& quantization,
                                                          const Shape& shape, QuantizeForm& form);

void scaled_part_ranges(const QuantizeForm& form, std::uint64_t begin, std::uint64_t end,
                        std::span<PartRange> ranges) noexcept;
std::uint64_t encode_scaled_window(const QuantizeForm& form, std::uint64_t begin, std::uint64_t end,
                                   const std::byte* numbers, std::span<std::byte* const> parts,
                                   std::span<const float> amax) noexcept;
void finish_scaled(const QuantizeForm& form, std::span<std::byte* const> parts,
                   std::span<const float> amax) noexcept;

}  // namespace loadstone
