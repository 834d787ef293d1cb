// Decodes groups of 256 elements. The format is described by a struct with these members:
//   block_bytes, block_elements   size of one block
//   run                           number of elements that share a scale
//   has_offset                    value = code * scale + offset; otherwise value = code * scale
//   half                          the arithmetic of GgufMode::half for this format
//   unpack(block, Unpacked)       writes the codes, scales and offsets of one block
// Included by files that Highway compiles once per instruction set.

#include <algorithm>
#include <array>
#include <bit>

#include "kernels/gguf.h"
#include "kernels/number.h"

#ifndef LOADSTONE_KERNELS_GGUF_GROUP_INL_ONCE
#define LOADSTONE_KERNELS_GGUF_GROUP_INL_ONCE

namespace loadstone::simd {

// products_only: rounds the scales and offsets to F16, and computes the values in F32.
enum class HalfArithmetic : std::uint8_t { none, full, products_only };

// The arrays that unpack() writes.
struct Unpacked {
  std::int8_t* codes;
  float* scales;
  float* offsets;
};

}  // namespace loadstone::simd
#endif

#if defined(LOADSTONE_KERNELS_GGUF_GROUP_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef LOADSTONE_KERNELS_GGUF_GROUP_INL_H
#undef LOADSTONE_KERNELS_GGUF_GROUP_INL_H
#else
#define LOADSTONE_KERNELS_GGUF_GROUP_INL_H
#endif

#include <hwy/highway.h>

#include "kernels/vector_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr std::size_t group_elements = 256;
inline constexpr std::size_t run_min = 16;

using Scales = std::array<float, group_elements / run_min>;

struct Group {
  alignas(64) std::array<std::int8_t, group_elements> codes;
  alignas(64) Scales scales{};
  alignas(64) Scales offsets{};
};

// ---- Arithmetic on single values

HWY_INLINE bool is_finite(float value) {
  return (std::bit_cast<std::uint32_t>(value) & 0x7f800000u) != 0x7f800000u;
}

HWY_INLINE float rounded_to_f16(float value) {
  const std::uint16_t half = number::f16_from_f32(std::bit_cast<std::uint32_t>(value));
  return std::bit_cast<float>(number::f32_from_f16(half));
}

HWY_INLINE float load_f16(const std::byte* from) {
  const std::uint32_t half = number::load_raw<std::uint16_t>(from);
  const std::uint32_t magnitude = half & 0x7fffu;
  if (HWY_UNLIKELY(magnitude - 0x400u >= 0x7800u)) return number::load<Dtype::f16>(from);
  return std::bit_cast<float>((half & 0x8000u) << 16 | ((magnitude << 13) + (112u << 23)));
}

// Negates, but keeps the sign of a NaN, like a subtraction from 0.
HWY_INLINE float negative(float value) { return value != value ? value : -value; }

// Computes scale * factor for each 8-bit factor. Uses vectors because floats that are stored one at
// a time would delay the next vector load.
template <std::size_t count, typename Integer>
HWY_INLINE void scale_by(float scale, const Integer* factors, float* to) {
  if (HWY_UNLIKELY(!is_finite(scale))) {
    for (std::size_t i = 0; i < count; ++i) {
      to[i] = number::product(scale, static_cast<float>(factors[i]));
    }
    return;
  }
  const hn::CappedTag<float, count> d;
  const hn::Rebind<std::int32_t, decltype(d)> d32;
  const hn::Rebind<Integer, decltype(d)> d8;
  for (std::size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto integers = hn::PromoteTo(d32, hn::LoadU(d8, factors + i));
    hn::StoreU(hn::Mul(hn::Set(d, scale), hn::ConvertTo(d, integers)), d, to + i);
  }
}

// ---- Bytes to codes

using Bytes = hn::CappedTag<std::uint8_t, 32>;
using HalfBytes = hn::CappedTag<std::uint8_t, 16>;

HWY_INLINE const std::uint8_t* octets(const std::byte* from) {
  return reinterpret_cast<const std::uint8_t*>(from);
}
HWY_INLINE const std::uint8_t* octets(const std::int8_t* codes) {
  return reinterpret_cast<const std::uint8_t*>(codes);
}
HWY_INLINE std::uint8_t* octets(std::int8_t* codes) {
  return reinterpret_cast<std::uint8_t*>(codes);
}

template <int shift, class D>
HWY_INLINE hn::Vec<D> field(D d, hn::Vec<D> bytes, std::uint8_t mask) {
  if constexpr (shift == 0) {
    return hn::And(bytes, hn::Set(d, mask));
  } else {
    return hn::And(hn::ShiftRight<shift>(bytes), hn::Set(d, mask));
  }
}

// Spreads the eight bits of a byte over eight bytes of 0 or 1, the lowest bit first.
HWY_INLINE std::uint64_t spread_bits(std::uint8_t byte) {
  const std::uint64_t each = (byte * 0x0101010101010101u) & 0x8040201008040201u;
  return ((each + 0x7f7f7f7f7f7f7f7fu) >> 7) & 0x0101010101010101u;
}

// Subtracts `amount` from each byte. All bytes must be below 128.
HWY_INLINE std::uint64_t subtract_from_each(std::uint64_t bytes, std::uint8_t amount) {
  constexpr std::uint64_t tops = 0x8080808080808080u;
  return ((bytes | tops) - amount * 0x0101010101010101u) ^ tops;
}

HWY_INLINE void store_codes(std::uint64_t codes, std::int8_t* to) {
  number::store_raw(reinterpret_cast<std::byte*>(to), codes);
}

// ---- Codes and scales to values

template <Dtype target, std::uint16_t nan>
struct WriterOf;
template <std::uint16_t nan>
struct WriterOf<Dtype::f32, nan> {
  using Type = WriteF32;
};
template <std::uint16_t nan>
struct WriterOf<Dtype::f16, nan> {
  using Type = WriteF16;
};
template <std::uint16_t nan>
struct WriterOf<Dtype::bf16, nan> {
  using Type = WriteBf16<nan>;
};

// Decodes a run whose scale or offset is infinite or NaN. If both terms of the sum are NaN, the
// result is the product's NaN, as in the reference decoder. With `half` the result is the offset's
// NaN: torch's own choice varies with the machine and the shape.
template <std::size_t run, bool has_offset, bool half, Dtype target, std::uint16_t nan>
HWY_NOINLINE void write_special_run(const std::int8_t* codes, float scale, float offset,
                                    std::byte* to) {
  for (std::size_t i = 0; i < run; ++i) {
    float value = number::product(scale, static_cast<float>(codes[i]));
    if constexpr (half) value = rounded_to_f16(value);
    if constexpr (has_offset && !half) value = number::sum(value, offset);
    if constexpr (has_offset && half) value = rounded_to_f16(number::sum(offset, value));
    number::store<target>(to + i * number::bytes_of<target>, value, nan);
  }
}

HWY_INLINE hn::Vec<F32> round_to_f16(hn::Vec<F32> values) {
  return hn::BitCast(F32(), bits_of_f16<false>(f16_of_bits<false>(hn::BitCast(U32(), values))));
}

HWY_INLINE bool all_finite(const float* values, std::size_t count) {
  std::uint32_t special = 0;
  for (std::size_t i = 0; i < count; ++i) special |= is_finite(values[i]) ? 0u : 1u;
  return special == 0;
}

// Returns the bits of the values of one vector, which starts at element `at` of the group.
template <std::size_t run, bool has_offset, bool half>
HWY_INLINE V bits_at(const Group& group, std::size_t at) {
  const F32 d;
  const hn::Rebind<std::int8_t, F32> d8;
  const auto codes = hn::PromoteTo(I32(), hn::LoadU(d8, group.codes.data() + at));
  auto values = hn::Mul(hn::Set(d, group.scales[at / run]), hn::ConvertTo(d, codes));
  if constexpr (half) values = round_to_f16(values);
  if constexpr (has_offset) values = hn::Add(values, hn::Set(d, group.offsets[at / run]));
  if constexpr (has_offset && half) values = round_to_f16(values);
  return hn::BitCast(U32(), values);
}

// Decodes two vectors at a time: blocks have at least 32 elements, so two vectors of 16 always fit.
template <std::size_t run, bool has_offset, bool half, Dtype target>
HWY_NOINLINE void write_runs(const Group& group, std::size_t runs, std::byte* to) {
  constexpr std::uint16_t nan = half ? number::bf16_nan_scalar : number::bf16_nan_vector;
  using Write = typename WriterOf<target, nan>::Type;
  const std::size_t count = runs * run;
  if (HWY_UNLIKELY(!all_finite(group.scales.data(), runs) ||
                   (has_offset && !all_finite(group.offsets.data(), runs)))) {
    for (std::size_t r = 0; r < runs; ++r) {
      write_special_run<run, has_offset, half, target, nan>(
          group.codes.data() + r * run, group.scales[r], has_offset ? group.offsets[r] : 0.0f,
          to + r * run * Write::bytes);
    }
    return;
  }
  const std::size_t lanes = hn::Lanes(F32());
  for (std::size_t at = 0; at < count; at += 32) {
    for (std::size_t i = at; i < at + 32; i += 2 * lanes) {
      const V first = bits_at<run, has_offset, half>(group, i);
      const V second = bits_at<run, has_offset, half>(group, i + lanes);
      Write::write_two(first, second, to + i * Write::bytes);
    }
  }
}

HWY_INLINE void round_all_to_f16(Scales& values) {
  auto* const bytes = reinterpret_cast<std::byte*>(values.data());
  for (std::size_t i = 0; i < values.size(); i += hn::Lanes(U32())) {
    const V rounded = bits_of_f16(f16_of_bits(load_bits(U32(), bytes + 4 * i)));
    store_bits(U32(), rounded, bytes + 4 * i);
  }
}

template <class Format>
HWY_NOINLINE void unpack_blocks(const std::byte* blocks, std::size_t count, Group& group) {
  for (std::size_t i = 0; i < count; ++i) {
    constexpr std::size_t runs = Format::block_elements / Format::run;
    Format::unpack(blocks + i * Format::block_bytes,
                   Unpacked{group.codes.data() + i * Format::block_elements,
                            group.scales.data() + i * runs, group.offsets.data() + i * runs});
  }
}

template <class Format, Dtype target, GgufMode mode>
void decode_blocks(const std::byte* blocks, std::uint64_t block_count, std::byte* to) noexcept {
  constexpr std::size_t blocks_in_group = group_elements / Format::block_elements;
  constexpr std::size_t runs_in_block = Format::block_elements / Format::run;
  constexpr bool full = mode == GgufMode::half && Format::half == HalfArithmetic::full;
  Group group;
  while (block_count > 0) {
    const auto count = std::min<std::uint64_t>(block_count, blocks_in_group);
    const std::size_t runs = count * runs_in_block;
    unpack_blocks<Format>(blocks, count, group);
    if constexpr (mode == GgufMode::half) {
      round_all_to_f16(group.scales);
      if constexpr (Format::has_offset) round_all_to_f16(group.offsets);
    }
    write_runs<Format::run, Format::has_offset, full, target>(group, runs, to);
    blocks += count * Format::block_bytes;
    to += count * Format::block_elements * number::bytes_of<target>;
    block_count -= count;
  }
}

template <class Format, GgufMode mode>
HWY_INLINE DecodeBlocks decoder_to(Dtype target) {
  switch (target) {
    case Dtype::f32:
      return decode_blocks<Format, Dtype::f32, mode>;
    case Dtype::f16:
      return decode_blocks<Format, Dtype::f16, mode>;
    case Dtype::bf16:
      return decode_blocks<Format, Dtype::bf16, mode>;
    default:
      return nullptr;
  }
}

template <class Format>
HWY_INLINE DecodeBlocks decoder_of(Dtype target, GgufMode mode) {
  if (mode == GgufMode::exact) return decoder_to<Format, GgufMode::exact>(target);
  if constexpr (Format::half == HalfArithmetic::none) {
    return nullptr;
  } else {
    return decoder_to<Format, GgufMode::half>(target);
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
