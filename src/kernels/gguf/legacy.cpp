// Decodes Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: blocks of 32 with one scale, and some with an offset.
#include "kernels/gguf/families.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gguf/legacy.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/gguf/group_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

// Unpacks 32 codes from 16 bytes and subtracts `less`. The low halves are the first 16 codes.
HWY_INLINE void unpack_nibbles(const std::byte* from, std::uint8_t less, std::int8_t* codes) {
  const HalfBytes d;
  for (std::size_t i = 0; i < 16; i += hn::Lanes(d)) {
    const auto bytes = hn::LoadU(d, octets(from) + i);
    hn::StoreU(hn::Sub(field<0>(d, bytes, 15), hn::Set(d, less)), d, octets(codes) + i);
    hn::StoreU(hn::Sub(field<4>(d, bytes, 15), hn::Set(d, less)), d, octets(codes) + 16 + i);
  }
}

// Like unpack_nibbles(), with a fifth bit for each code from the 32 bits at `high`.
HWY_INLINE void unpack_fives(const std::byte* high, const std::byte* from, std::uint8_t less,
                             std::int8_t* codes) {
  std::array<std::uint64_t, 4> fifths;
  for (std::size_t i = 0; i < 4; ++i) fifths[i] = spread_bits(octets(high)[i]) << 4;
  const auto* const fifth = reinterpret_cast<const std::uint8_t*>(fifths.data());
  const HalfBytes d;
  for (std::size_t i = 0; i < 16; i += hn::Lanes(d)) {
    const auto bytes = hn::LoadU(d, octets(from) + i);
    const auto low = hn::Or(field<0>(d, bytes, 15), hn::LoadU(d, fifth + i));
    const auto top = hn::Or(field<4>(d, bytes, 15), hn::LoadU(d, fifth + 16 + i));
    hn::StoreU(hn::Sub(low, hn::Set(d, less)), d, octets(codes) + i);
    hn::StoreU(hn::Sub(top, hn::Set(d, less)), d, octets(codes) + 16 + i);
  }
}

struct Block32 {
  static constexpr std::size_t block_elements = 32;
  static constexpr std::size_t run = 32;
  static constexpr bool has_offset = false;
  static constexpr HalfArithmetic half = HalfArithmetic::full;
};

struct Q4_0 : Block32 {
  static constexpr std::size_t block_bytes = 18;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    to.scales[0] = load_f16(block);
    unpack_nibbles(block + 2, 8, to.codes);
  }
};

struct Q4_1 : Block32 {
  static constexpr std::size_t block_bytes = 20;
  static constexpr bool has_offset = true;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    to.scales[0] = load_f16(block);
    to.offsets[0] = load_f16(block + 2);
    unpack_nibbles(block + 4, 0, to.codes);
  }
};

struct Q5_0 : Block32 {
  static constexpr std::size_t block_bytes = 22;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    to.scales[0] = load_f16(block);
    unpack_fives(block + 2, block + 6, 16, to.codes);
  }
};

struct Q5_1 : Block32 {
  static constexpr std::size_t block_bytes = 24;
  static constexpr bool has_offset = true;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    to.scales[0] = load_f16(block);
    to.offsets[0] = load_f16(block + 2);
    unpack_fives(block + 4, block + 8, 0, to.codes);
  }
};

struct Q8_0 : Block32 {
  static constexpr std::size_t block_bytes = 34;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    to.scales[0] = load_f16(block);
    std::memcpy(to.codes, block + 2, 32);
  }
};

DecodeBlocks FindLegacy(BlockFormat format, Dtype target, GgufMode mode) {
  switch (format) {
    case BlockFormat::q4_0:
      return decoder_of<Q4_0>(target, mode);
    case BlockFormat::q4_1:
      return decoder_of<Q4_1>(target, mode);
    case BlockFormat::q5_0:
      return decoder_of<Q5_0>(target, mode);
    case BlockFormat::q5_1:
      return decoder_of<Q5_1>(target, mode);
    case BlockFormat::q8_0:
      return decoder_of<Q8_0>(target, mode);
    default:
      return nullptr;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(FindLegacy);

DecodeBlocks legacy_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept {
  return HWY_DYNAMIC_DISPATCH(FindLegacy)(format, target, mode);
}

}  // namespace loadstone::simd
#endif
