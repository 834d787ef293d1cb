#include "kernels/gguf/exact_blocks.h"

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

#include "kernels/exact_scale.h"
#include "kernels/gguf/codes.h"

namespace loadstone {

namespace {

constexpr std::size_t block_elements = 32;
using Codes = std::array<std::uint8_t, block_elements>;
using Block = std::span<const float, block_elements>;

// Packs the low four bits of 32 codes into 16 bytes. The first 16 codes are the low halves.
void pack_halves(const Codes& codes, std::byte* to) noexcept {
  for (std::size_t i = 0; i < block_elements / 2; ++i) {
    to[i] = std::byte(simd::byte_of((codes[i] & 15) | codes[i + block_elements / 2] << 4));
  }
}

void pack_fifths(const Codes& codes, std::byte* to) noexcept {
  for (std::size_t i = 0; i < 4; ++i) {
    to[i] = simd::gathered_bits(simd::eight_codes(codes.data() + 8 * i) >> 4);
  }
}

void encode_affine(int top, Block values, std::byte* block) noexcept {
  const auto found = exact_affine(top, values);
  if (!found) return;
  Codes codes;
  write_affine_codes(*found, top, values, codes.data());
  simd::store_f16(block, found->scale);
  simd::store_f16(block + 2, found->minimum);
  const bool has_fifths = top > 15;
  if (has_fifths) pack_fifths(codes, block + 4);
  pack_halves(codes, block + (has_fifths ? 8 : 4));
}

std::optional<CodeSet> codes_of(BlockFormat format) noexcept {
  switch (format) {
    case BlockFormat::q4_0:
      return CodeSet::int4;
    case BlockFormat::q5_0:
      return CodeSet::int5;
    case BlockFormat::q8_0:
      return CodeSet::int8;
    case BlockFormat::iq4_nl:
      return CodeSet::iq4;
    case BlockFormat::mxfp4:
      return CodeSet::e2m1;
    default:
      return std::nullopt;
  }
}

}  // namespace

void encode_exactly(BlockFormat format, const float* numbers, std::byte* block) noexcept {
  const Block values(numbers, block_elements);
  if (format == BlockFormat::q4_1) return encode_affine(15, values, block);
  if (format == BlockFormat::q5_1) return encode_affine(31, values, block);
  const auto set = codes_of(format);
  if (!set) return;
  const bool has_exponent = *set == CodeSet::e2m1;
  const BlockArithmetic arithmetic = {.codes = *set,
                                      .scale = has_exponent ? Dtype::f8_e8m0 : Dtype::f16,
                                      .has_signed_scale = !has_exponent};
  const auto scale = exact_scale(arithmetic, {numbers, block_elements});
  if (!scale) return;
  Codes codes;
  write_codes(arithmetic, *scale, values, codes.data());
  if (has_exponent) {
    *block++ =
        std::byte(simd::byte_of(static_cast<int>(std::bit_cast<std::uint32_t>(*scale) >> 23)));
  } else {
    simd::store_f16(block, *scale);
    block += 2;
  }
  if (*set == CodeSet::int8) {
    std::memcpy(block, codes.data(), codes.size());
    return;
  }
  // Stored integers begin at 0.
  const int offset = *set == CodeSet::int4 ? 8 : *set == CodeSet::int5 ? 16 : 0;
  for (std::uint8_t& code : codes) code = simd::byte_of(code + offset);
  if (*set == CodeSet::int5) {
    pack_fifths(codes, block);
    block += 4;
  }
  pack_halves(codes, block);
}

}  // namespace loadstone
