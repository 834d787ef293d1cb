// Decodes Q2_K to Q6_K: blocks of 256 with runs of 16 or 32, each with a small integer scale.
#include "kernels/gguf/families.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gguf/k_types.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/gguf/group_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

struct Block256 {
  static constexpr std::size_t block_elements = 256;
  static constexpr HalfArithmetic half = HalfArithmetic::full;
};

struct Q2_K : Block256 {
  static constexpr std::size_t block_bytes = 84;
  static constexpr std::size_t run = 16;
  static constexpr bool has_offset = true;

  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    std::array<std::uint8_t, 16> scales;
    std::array<std::uint8_t, 16> minima;
    for (std::size_t i = 0; i < 16; ++i) {
      scales[i] = octets(block)[i] & 15;
      minima[i] = octets(block)[i] >> 4;
    }
    scale_by<16>(load_f16(block + 80), scales.data(), to.scales);
    scale_by<16>(negative(load_f16(block + 82)), minima.data(), to.offsets);
    const Bytes d;
    for (std::size_t half_block = 0; half_block < 2; ++half_block) {
      std::uint8_t* const codes = octets(to.codes) + 128 * half_block;
      for (std::size_t i = 0; i < 32; i += hn::Lanes(d)) {
        const auto bytes = hn::LoadU(d, octets(block) + 16 + 32 * half_block + i);
        hn::StoreU(field<0>(d, bytes, 3), d, codes + i);
        hn::StoreU(field<2>(d, bytes, 3), d, codes + 32 + i);
        hn::StoreU(field<4>(d, bytes, 3), d, codes + 64 + i);
        hn::StoreU(field<6>(d, bytes, 3), d, codes + 96 + i);
      }
    }
  }
};

struct Q3_K : Block256 {
  static constexpr std::size_t block_bytes = 110;
  static constexpr std::size_t run = 16;
  static constexpr bool has_offset = false;

  // Joins two bits of `bytes` from bit `low` up with bit `high` of `tops`, and subtracts 4.
  template <int low, int high, class D>
  static HWY_INLINE hn::Vec<D> code(D d, hn::Vec<D> bytes, hn::Vec<D> tops) {
    const auto top = field<high>(d, tops, 1);
    const auto four = hn::Add(hn::Add(top, top), hn::Add(top, top));
    return hn::Sub(hn::Or(field<low>(d, bytes, 3), four), hn::Set(d, 4));
  }

  template <int first_top>
  static HWY_INLINE void unpack_half(const std::byte* bytes_at, const std::byte* tops_at,
                                     std::uint8_t* codes) {
    const Bytes d;
    for (std::size_t i = 0; i < 32; i += hn::Lanes(d)) {
      const auto bytes = hn::LoadU(d, octets(bytes_at) + i);
      const auto tops = hn::LoadU(d, octets(tops_at) + i);
      hn::StoreU(code<0, first_top>(d, bytes, tops), d, codes + i);
      hn::StoreU(code<2, first_top + 1>(d, bytes, tops), d, codes + 32 + i);
      hn::StoreU(code<4, first_top + 2>(d, bytes, tops), d, codes + 64 + i);
      hn::StoreU(code<6, first_top + 3>(d, bytes, tops), d, codes + 96 + i);
    }
  }

  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    const auto low = number::load_raw<std::uint64_t>(block + 96);
    const std::uint64_t high = number::load_raw<std::uint32_t>(block + 104);
    // Byte i contains the top two bits of scale i (bits 0 and 1) and of scale i + 8 (bits 4 and 5).
    const std::uint64_t tops = high | high >> 2 << 32;
    constexpr std::uint64_t nibbles = 0x0f0f0f0f0f0f0f0fu;
    constexpr std::uint64_t pairs = 0x0303030303030303u;
    const std::array<std::uint64_t, 2> scales = {
        subtract_from_each((low & nibbles) | (tops & pairs) << 4, 32),
        subtract_from_each((low >> 4 & nibbles) | (tops >> 4 & pairs) << 4, 32)};
    const float d = load_f16(block + 108);
    for (std::size_t i = 0; i < 2; ++i) {
      const auto factors = std::bit_cast<std::array<std::int8_t, 8>>(scales[i]);
      scale_by<8>(d, factors.data(), to.scales + 8 * i);
    }
    unpack_half<0>(block + 32, block, octets(to.codes));
    unpack_half<4>(block + 64, block, octets(to.codes) + 128);
  }
};

// Unpacks the scales of Q4_K and Q5_K: d, dmin, and 8 pairs of 6-bit codes in 12 bytes.
HWY_INLINE void unpack_scales_and_minima(const std::byte* block, Unpacked to) {
  const auto scale = number::load_raw<std::uint32_t>(block + 4);
  const auto minimum = number::load_raw<std::uint32_t>(block + 8);
  const auto both = number::load_raw<std::uint32_t>(block + 12);
  const std::uint32_t high_scales = (both & 0x0f0f0f0fu) | (scale >> 2 & 0x30303030u);
  const std::uint32_t high_minima = (both >> 4 & 0x0f0f0f0fu) | (minimum >> 2 & 0x30303030u);
  // Unpacks in registers, because a pass through memory would be slower.
  const auto scales = std::bit_cast<std::array<std::uint8_t, 8>>((scale & 0x3f3f3f3fu) |
                                                                 std::uint64_t{high_scales} << 32);
  const auto minima = std::bit_cast<std::array<std::uint8_t, 8>>((minimum & 0x3f3f3f3fu) |
                                                                 std::uint64_t{high_minima} << 32);
  scale_by<8>(load_f16(block), scales.data(), to.scales);
  scale_by<8>(negative(load_f16(block + 2)), minima.data(), to.offsets);
}

struct Q4_K : Block256 {
  static constexpr std::size_t block_bytes = 144;
  static constexpr std::size_t run = 32;
  static constexpr bool has_offset = true;

  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    unpack_scales_and_minima(block, to);
    const Bytes d;
    for (std::size_t quarter = 0; quarter < 4; ++quarter) {
      std::uint8_t* const codes = octets(to.codes) + 64 * quarter;
      for (std::size_t i = 0; i < 32; i += hn::Lanes(d)) {
        const auto bytes = hn::LoadU(d, octets(block) + 16 + 32 * quarter + i);
        hn::StoreU(field<0>(d, bytes, 15), d, codes + i);
        hn::StoreU(field<4>(d, bytes, 15), d, codes + 32 + i);
      }
    }
  }
};

struct Q5_K : Block256 {
  static constexpr std::size_t block_bytes = 176;
  static constexpr std::size_t run = 32;
  static constexpr bool has_offset = true;

  template <int quarter>
  static HWY_INLINE void unpack_quarter(const std::byte* block, std::uint8_t* codes) {
    const Bytes d;
    for (std::size_t i = 0; i < 32; i += hn::Lanes(d)) {
      const auto bytes = hn::LoadU(d, octets(block) + 48 + 32 * quarter + i);
      const auto tops = hn::LoadU(d, octets(block) + 16 + i);
      const auto low_top = hn::ShiftLeft<4>(field<2 * quarter>(d, tops, 1));
      const auto high_top = hn::ShiftLeft<4>(field<2 * quarter + 1>(d, tops, 1));
      hn::StoreU(hn::Or(field<0>(d, bytes, 15), low_top), d, codes + 64 * quarter + i);
      hn::StoreU(hn::Or(field<4>(d, bytes, 15), high_top), d, codes + 64 * quarter + 32 + i);
    }
  }

  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    unpack_scales_and_minima(block, to);
    unpack_quarter<0>(block, octets(to.codes));
    unpack_quarter<1>(block, octets(to.codes));
    unpack_quarter<2>(block, octets(to.codes));
    unpack_quarter<3>(block, octets(to.codes));
  }
};

struct Q6_K : Block256 {
  static constexpr std::size_t block_bytes = 210;
  static constexpr std::size_t run = 16;
  static constexpr bool has_offset = false;

  // Joins four bits of `bytes` from bit `shift` up with two bits of `tops` from bit `high` up, and
  // subtracts 32.
  template <int shift, int high, class D>
  static HWY_INLINE hn::Vec<D> code(D d, hn::Vec<D> bytes, hn::Vec<D> tops) {
    const auto top = hn::ShiftLeft<4>(field<high>(d, tops, 3));
    return hn::Sub(hn::Or(field<shift>(d, bytes, 15), top), hn::Set(d, 32));
  }

  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    scale_by<16>(load_f16(block + 208), reinterpret_cast<const std::int8_t*>(block + 192),
                 to.scales);
    const Bytes d;
    for (std::size_t half_block = 0; half_block < 2; ++half_block) {
      const std::uint8_t* const low = octets(block) + 64 * half_block;
      std::uint8_t* const codes = octets(to.codes) + 128 * half_block;
      for (std::size_t i = 0; i < 32; i += hn::Lanes(d)) {
        const auto first = hn::LoadU(d, low + i);
        const auto second = hn::LoadU(d, low + 32 + i);
        const auto tops = hn::LoadU(d, octets(block) + 128 + 32 * half_block + i);
        hn::StoreU(code<0, 0>(d, first, tops), d, codes + i);
        hn::StoreU(code<0, 2>(d, second, tops), d, codes + 32 + i);
        hn::StoreU(code<4, 4>(d, first, tops), d, codes + 64 + i);
        hn::StoreU(code<4, 6>(d, second, tops), d, codes + 96 + i);
      }
    }
  }
};

DecodeBlocks FindK(BlockFormat format, Dtype target, GgufMode mode) {
  switch (format) {
    case BlockFormat::q2_k:
      return decoder_of<Q2_K>(target, mode);
    case BlockFormat::q3_k:
      return decoder_of<Q3_K>(target, mode);
    case BlockFormat::q4_k:
      return decoder_of<Q4_K>(target, mode);
    case BlockFormat::q5_k:
      return decoder_of<Q5_K>(target, mode);
    case BlockFormat::q6_k:
      return decoder_of<Q6_K>(target, mode);
    default:
      return nullptr;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(FindK);

DecodeBlocks k_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept {
  return HWY_DYNAMIC_DISPATCH(FindK)(format, target, mode);
}

}  // namespace loadstone::simd
#endif
