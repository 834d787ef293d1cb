#include "kernels/modelopt/exact.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>

#include "kernels/modelopt/scales.h"
#include "kernels/number.h"

namespace loadstone {

namespace scaled {

namespace {

// Finds the exact scale of a block, and its codes.
template <std::size_t most>
std::optional<float> encode_block(const BlockArithmetic& arithmetic, std::span<const float> values,
                                  std::array<std::uint8_t, most>& codes) noexcept {
  const auto scale = exact_scale(arithmetic, {values.data(), values.size()});
  if (!scale) return scale;
  codes = {};
  write_codes(arithmetic, *scale, values, codes.data());
  return scale;
}

std::byte pair(unsigned low, unsigned high) noexcept {
  return static_cast<std::byte>((low & 15u) | (high & 15u) << 4);
}

}  // namespace

std::optional<float> exact_scale_of(const QuantizedLayout& form,
                                    const BlockValues& values) noexcept {
  const bool is_int8 = form.kind == QuantizeKind::int8_channel;
  return exact_scale({.codes = is_int8 ? CodeSet::int8 : CodeSet::e4m3}, values);
}

void encode_nvfp4_exactly(float scale_2, const float* numbers, std::uint64_t columns,
                          std::byte* data, std::byte* scales) noexcept {
  const BlockArithmetic arithmetic = {CodeSet::e2m1, Dtype::f8_e4m3, scale_2};
  std::array<std::uint8_t, nvfp4_block> codes;
  for (std::uint64_t at = 0; at < columns; at += nvfp4_block) {
    const std::uint64_t size = std::min(nvfp4_block, columns - at);
    const auto scale = encode_block(arithmetic, {numbers + at, size}, codes);
    if (!scale) continue;
    scales[at / nvfp4_block] =
        std::byte{number::f8_e4m3_from_f32(std::bit_cast<std::uint32_t>(*scale))};
    for (std::size_t i = 0; i < nvfp4_block; i += 2) {
      data[(at + i) / 2] = pair(codes[i], codes[i + 1]);
    }
  }
}

void encode_int4_exactly(const float* numbers, std::uint64_t count, std::byte* data,
                         std::byte* scales) noexcept {
  constexpr BlockArithmetic arithmetic = {.codes = CodeSet::int4, .is_inverse = true};
  std::array<std::uint8_t, int4_block> codes;
  for (std::uint64_t at = 0; at < count; at += int4_block) {
    const auto scale = encode_block(arithmetic, {numbers + at, int4_block}, codes);
    if (!scale) continue;
    number::store_raw(scales + at / int4_block * sizeof(float), *scale);
    for (std::size_t i = 0; i < int4_block; i += 2) {
      data[(at + i) / 2] = pair(codes[i + 1] + 8u, codes[i] + 8u);
    }
  }
}

void encode_int4_groups_exactly(std::uint64_t group_size, const float* numbers, std::uint64_t count,
                                std::byte* data, std::byte* scales) noexcept {
  constexpr BlockArithmetic arithmetic = {.codes = CodeSet::int4, .has_signed_scale = true};
  std::array<std::uint8_t, int4_block> codes;
  for (std::uint64_t at = 0; at < count; at += group_size) {
    const auto scale = encode_block(arithmetic, {numbers + at, group_size}, codes);
    if (!scale) continue;
    number::store_raw(scales + at / group_size * sizeof(float), *scale);
    for (std::size_t i = 0; i < group_size; i += 2) {
      data[(at + i) / 2] = pair(codes[i] + 8u, codes[i + 1] + 8u);
    }
  }
}

void encode_int4_rows_exactly(const float* numbers, std::uint64_t columns, std::byte* data,
                              std::byte* scales) noexcept {
  constexpr BlockArithmetic arithmetic = {.codes = CodeSet::int4};
  std::array<std::uint8_t, int4_block> codes;
  for (std::uint64_t at = 0; at < 2 * columns; at += int4_block) {
    const auto scale = encode_block(arithmetic, {numbers + at, int4_block}, codes);
    if (!scale) continue;
    number::store_raw(scales + at / int4_block * sizeof(float), *scale);
    const bool is_upper = at < columns;
    std::byte* const to = data + at % columns;
    for (std::size_t i = 0; i < int4_block; ++i) {
      const auto byte = std::to_integer<unsigned>(to[i]);
      to[i] = is_upper ? pair(codes[i], byte >> 4) : pair(byte, codes[i]);
    }
  }
}

}  // namespace scaled

float exact_matrix_scale(const QuantizedLayout& form, float amax,
                         const ExactScales& exact) noexcept {
  if (form.kind == QuantizeKind::fp8) return exact.scale(amax, true);
  return scaled::exact_nvfp4_scale_2(form, amax, exact);
}

}  // namespace loadstone
