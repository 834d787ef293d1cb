// Decodes IQ4_NL, IQ4_XS, MXFP4 and NVFP4: four-bit codes, which are indices into a table of
// values.
#include "kernels/gguf/families.h"
#include "kernels/gguf/tables.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gguf/table.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/gguf/group_inl.h"

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

// Looks up the codes of `count` <= 16 bytes: first all low halves, then all high halves.
template <std::size_t count>
HWY_INLINE void look_up(const Table& table, const std::byte* from, std::int8_t* to) {
#if HWY_TARGET == HWY_SCALAR
  for (std::size_t i = 0; i < count; ++i) {
    to[i] = table[octets(from)[i] & 15];
    to[count + i] = table[octets(from)[i] >> 4];
  }
#else
  const hn::FixedTag<std::uint8_t, 16> whole;
  const hn::CappedTag<std::uint8_t, count> d;
  const auto values = hn::Load(whole, octets(table.data()));
  for (std::size_t i = 0; i < count; i += hn::Lanes(d)) {
    const auto bytes = hn::LoadU(d, octets(from) + i);
    hn::StoreU(hn::TableLookupBytes(values, field<0>(d, bytes, 15)), d, octets(to) + i);
    hn::StoreU(hn::TableLookupBytes(values, field<4>(d, bytes, 15)), d, octets(to) + count + i);
  }
#endif
}

struct Iq4Nl {
  static constexpr std::size_t block_bytes = 18;
  static constexpr std::size_t block_elements = 32;
  static constexpr std::size_t run = 32;
  static constexpr bool has_offset = false;
  static constexpr HalfArithmetic half = HalfArithmetic::products_only;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    to.scales[0] = load_f16(block);
    look_up<16>(iq4_values, block + 2, to.codes);
  }
};

struct Iq4Xs {
  static constexpr std::size_t block_bytes = 136;
  static constexpr std::size_t block_elements = 256;
  static constexpr std::size_t run = 32;
  static constexpr bool has_offset = false;
  static constexpr HalfArithmetic half = HalfArithmetic::products_only;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    const unsigned high = number::load_raw<std::uint16_t>(block + 2);
    std::array<std::int8_t, 8> scales;
    for (unsigned i = 0; i < 8; ++i) {
      const unsigned low = (octets(block)[4 + i / 2] >> (4 * (i % 2))) & 15u;
      const unsigned top = (high >> (2 * i)) & 3u;
      scales[i] = static_cast<std::int8_t>(static_cast<int>(low | top << 4) - 32);
    }
    scale_by<8>(load_f16(block), scales.data(), to.scales);
    for (std::size_t i = 0; i < 8; ++i) {
      look_up<16>(iq4_values, block + 8 + 16 * i, to.codes + 32 * i);
    }
  }
};

struct Mxfp4 {
  static constexpr std::size_t block_bytes = 17;
  static constexpr std::size_t block_elements = 32;
  static constexpr std::size_t run = 32;
  static constexpr bool has_offset = false;
  static constexpr HalfArithmetic half = HalfArithmetic::none;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    to.scales[0] = half_of_e8m0(octets(block)[0]);
    look_up<16>(e2m1_doubled, block + 1, to.codes);
  }
};

struct Nvfp4 {
  static constexpr std::size_t block_bytes = 36;
  static constexpr std::size_t block_elements = 64;
  static constexpr std::size_t run = 16;
  static constexpr bool has_offset = false;
  static constexpr HalfArithmetic half = HalfArithmetic::none;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    for (std::size_t i = 0; i < 4; ++i) {
      to.scales[i] = half_of_ue4m3(octets(block)[i]);
      look_up<8>(e2m1_doubled, block + 4 + 8 * i, to.codes + 16 * i);
    }
  }
};

DecodeBlocks FindTable(BlockFormat format, Dtype target, GgufMode mode) {
  switch (format) {
    case BlockFormat::iq4_nl:
      return decoder_of<Iq4Nl>(target, mode);
    case BlockFormat::iq4_xs:
      return decoder_of<Iq4Xs>(target, mode);
    case BlockFormat::mxfp4:
      return decoder_of<Mxfp4>(target, mode);
    case BlockFormat::nvfp4:
      return decoder_of<Nvfp4>(target, mode);
    default:
      return nullptr;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(FindTable);

DecodeBlocks table_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept {
  return HWY_DYNAMIC_DISPATCH(FindTable)(format, target, mode);
}

}  // namespace loadstone::simd
#endif
