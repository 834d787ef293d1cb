// Decodes TQ1_0, TQ2_0, Q1_0 and Q2_0: codes of one or two bits or base-3 digits, with one scale
// per block.
#include "kernels/gguf/families.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gguf/low_bit.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/gguf/group_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

struct OneScale {
  static constexpr std::size_t run = 32;
  static constexpr bool has_offset = false;
  static constexpr HalfArithmetic half = HalfArithmetic::none;
};

HWY_INLINE void same_scales(const std::byte* half, std::size_t runs, float* scales) {
  std::fill_n(scales, runs, load_f16(half));
}

// Unpacks the base-3 digits of `count` bytes, each of which is a fraction in units of 1/256. Writes
// digit 1 of all bytes, then digit 2 of all bytes, and so on.
template <std::size_t count, std::size_t digits>
HWY_INLINE void unpack_digits(const std::byte* from, std::int8_t* codes) {
  const hn::CappedTag<std::uint8_t, count> d;
  for (std::size_t i = 0; i < count; i += hn::Lanes(d)) {
    auto fraction = hn::LoadU(d, octets(from) + i);
    for (std::size_t digit = 0; digit < digits; ++digit) {
      // The digit is fraction * 3 / 256: 1 from 86 on, and 2 from 171 on. A true mask is -1.
      const auto one = hn::VecFromMask(d, hn::Eq(hn::Max(fraction, hn::Set(d, 86)), fraction));
      const auto two = hn::VecFromMask(d, hn::Eq(hn::Max(fraction, hn::Set(d, 171)), fraction));
      const auto code = hn::Sub(hn::Sub(hn::Set(d, 255), one), two);
      hn::StoreU(code, d, octets(codes) + digit * count + i);
      fraction = hn::Add(hn::Add(fraction, fraction), fraction);
    }
  }
}

struct Tq1_0 : OneScale {
  static constexpr std::size_t block_bytes = 54;
  static constexpr std::size_t block_elements = 256;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    same_scales(block + 52, 8, to.scales);
    unpack_digits<32, 5>(block, to.codes);
    unpack_digits<16, 5>(block + 32, to.codes + 160);
    unpack_digits<4, 4>(block + 48, to.codes + 240);
  }
};

struct Tq2_0 : OneScale {
  static constexpr std::size_t block_bytes = 66;
  static constexpr std::size_t block_elements = 256;

  template <int shift, class D>
  static HWY_INLINE void store(D d, hn::Vec<D> bytes, std::uint8_t* to) {
    hn::StoreU(hn::Sub(field<shift>(d, bytes, 3), hn::Set(d, 1)), d, to);
  }

  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    same_scales(block + 64, 8, to.scales);
    const Bytes d;
    for (std::size_t half_block = 0; half_block < 2; ++half_block) {
      std::uint8_t* const codes = octets(to.codes) + 128 * half_block;
      for (std::size_t i = 0; i < 32; i += hn::Lanes(d)) {
        const auto bytes = hn::LoadU(d, octets(block) + 32 * half_block + i);
        store<0>(d, bytes, codes + i);
        store<2>(d, bytes, codes + 32 + i);
        store<4>(d, bytes, codes + 64 + i);
        store<6>(d, bytes, codes + 96 + i);
      }
    }
  }
};

struct Q1_0 : OneScale {
  static constexpr std::size_t block_bytes = 18;
  static constexpr std::size_t block_elements = 128;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    same_scales(block, 4, to.scales);
    for (std::size_t i = 0; i < 16; ++i) {
      const std::uint64_t ones = spread_bits(octets(block)[2 + i]);
      const std::uint64_t zeros = ones ^ 0x0101010101010101u;
      store_codes(ones | zeros * 255, to.codes + 8 * i);
    }
  }
};

struct Q2_0 : OneScale {
  static constexpr std::size_t block_bytes = 18;
  static constexpr std::size_t block_elements = 64;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    same_scales(block, 2, to.scales);
    for (std::size_t i = 0; i < 8; ++i) {
      const std::uint64_t first = octets(block)[2 + 2 * i];
      const std::uint64_t bytes = first | std::uint64_t{octets(block)[3 + 2 * i]} << 32;
      const std::uint64_t each =
          (bytes | bytes << 6 | bytes << 12 | bytes << 18) & 0x0303030303030303u;
      store_codes(subtract_from_each(each, 1), to.codes + 8 * i);
    }
  }
};

DecodeBlocks FindLowBit(BlockFormat format, Dtype target, GgufMode mode) {
  switch (format) {
    case BlockFormat::tq1_0:
      return decoder_of<Tq1_0>(target, mode);
    case BlockFormat::tq2_0:
      return decoder_of<Tq2_0>(target, mode);
    case BlockFormat::q1_0:
      return decoder_of<Q1_0>(target, mode);
    case BlockFormat::q2_0:
      return decoder_of<Q2_0>(target, mode);
    default:
      return nullptr;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(FindLowBit);

DecodeBlocks low_bit_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept {
  return HWY_DYNAMIC_DISPATCH(FindLowBit)(format, target, mode);
}

}  // namespace loadstone::simd
#endif
