// Decodes IQ1, IQ2 and IQ3: each group of 4 or 8 values is a point of a grid, with signs.
#include "kernels/gguf/families.h"
#include "kernels/gguf/grid_data.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gguf/grid.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

#include "kernels/gguf/group_inl.h"

#ifndef LOADSTONE_KERNELS_GGUF_GRID_ONCE
#define LOADSTONE_KERNELS_GGUF_GRID_ONCE

namespace loadstone::simd {

// Expands packed points to one byte per coordinate, with the first coordinate in the lowest byte.
template <typename Point, std::size_t points, std::size_t values>
constexpr std::array<Point, points> grid_of(const std::array<std::uint16_t, points>& packed,
                                            const std::array<std::uint8_t, values>& coordinates) {
  constexpr std::size_t dims = sizeof(Point);
  constexpr std::size_t bits = 16 / dims;
  std::array<Point, points> grid{};
  for (std::size_t i = 0; i < points; ++i) {
    for (std::size_t k = 0; k < dims; ++k) {
      const Point value = coordinates[(packed[i] >> (bits * k)) & ((1u << bits) - 1)];
      grid[i] |= value << (8 * k);
    }
  }
  return grid;
}

inline constexpr std::array<std::uint8_t, 4> iq2_values = {8, 25, 43, 0};
inline constexpr auto iq2_xxs_grid = grid_of<std::uint64_t>(iq2_xxs_points, iq2_values);
inline constexpr auto iq2_xs_grid = grid_of<std::uint64_t>(iq2_xs_points, iq2_values);
inline constexpr auto iq2_s_grid = grid_of<std::uint64_t>(iq2_s_points, iq2_values);

inline constexpr std::array<std::uint8_t, 16> iq3_xxs_values = {4, 12, 20, 28, 36, 44, 52, 62};
inline constexpr std::array<std::uint8_t, 16> iq3_s_values = {1, 3, 5, 7, 9, 11, 13, 15};
inline constexpr auto iq3_xxs_grid = grid_of<std::uint32_t>(iq3_xxs_points, iq3_xxs_values);
inline constexpr auto iq3_s_grid = grid_of<std::uint32_t>(iq3_s_points, iq3_s_values);

// The coordinates -1, 0 and 1 in units of 1/8, plus 8 so that they are not negative.
inline constexpr std::array<std::uint8_t, 4> iq1_values = {0, 8, 16, 0};
inline constexpr auto iq1_grid = grid_of<std::uint64_t>(iq1_points, iq1_values);

// For each byte, eight bytes that are 0xff for its 1 bits and 0 for its 0 bits.
inline constexpr auto sign_masks = [] {
  std::array<std::uint64_t, 256> masks{};
  for (std::size_t i = 0; i < masks.size(); ++i) {
    for (std::size_t k = 0; k < 8; ++k) {
      if ((i >> k & 1u) != 0) masks[i] |= std::uint64_t{0xff} << (8 * k);
    }
  }
  return masks;
}();

// The same masks for 7 stored signs; the eighth sign makes the number of minus signs even.
inline constexpr auto even_sign_masks = [] {
  std::array<std::uint64_t, 128> masks{};
  for (std::size_t i = 0; i < masks.size(); ++i) {
    masks[i] = sign_masks[i | (std::popcount(i) % 2 == 0 ? 0u : 0x80u)];
  }
  return masks;
}();

}  // namespace loadstone::simd
#endif

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

// Negates the bytes whose mask is 0xff. All bytes are 1 to 127.
HWY_INLINE std::uint64_t with_signs(std::uint64_t bytes, std::uint64_t mask) {
  return (bytes ^ mask) + (mask & 0x0101010101010101u);
}

HWY_INLINE std::uint64_t both(std::uint32_t low, std::uint32_t high) {
  return low | std::uint64_t{high} << 32;
}

HWY_INLINE std::size_t nibble(const std::byte* from, std::size_t i) {
  return (octets(from)[i / 2] >> (4 * (i % 2))) & 15u;
}

// Computes scale * (2 * index + 1) * unit for each index. `unit` is a power of two.
template <std::size_t count>
HWY_INLINE void odd_scales(float scale, const std::array<std::uint8_t, count>& indices, float unit,
                           float* to) {
  std::array<std::uint8_t, count> factors;
  for (std::size_t i = 0; i < count; ++i) {
    factors[i] = static_cast<std::uint8_t>(2 * indices[i] + 1);
  }
  scale_by<count>(scale, factors.data(), to);
  for (std::size_t i = 0; i < count; ++i) to[i] *= unit;
}

template <std::size_t count>
HWY_INLINE void nibble_scales(float scale, const std::byte* from, float unit, float* to) {
  std::array<std::uint8_t, count> indices;
  for (std::size_t i = 0; i < count; ++i) indices[i] = static_cast<std::uint8_t>(nibble(from, i));
  odd_scales(scale, indices, unit, to);
}

struct GridBlock {
  static constexpr std::size_t block_elements = 256;
  static constexpr bool has_offset = false;
  static constexpr HalfArithmetic half = HalfArithmetic::none;
};

struct Iq2Xxs : GridBlock {
  static constexpr std::size_t block_bytes = 66;
  static constexpr std::size_t run = 32;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    std::array<std::uint8_t, 8> scales;
    for (std::size_t r = 0; r < 8; ++r) {
      const std::byte* const from = block + 2 + 8 * r;
      const auto packed = number::load_raw<std::uint32_t>(from + 4);
      scales[r] = static_cast<std::uint8_t>(packed >> 28);
      for (std::size_t i = 0; i < 4; ++i) {
        const std::uint64_t mask = even_sign_masks[packed >> (7 * i) & 127u];
        store_codes(with_signs(iq2_xxs_grid[octets(from)[i]], mask), to.codes + 32 * r + 8 * i);
      }
    }
    odd_scales(load_f16(block), scales, 0.125f, to.scales);
  }
};

struct Iq2Xs : GridBlock {
  static constexpr std::size_t block_bytes = 74;
  static constexpr std::size_t run = 16;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    nibble_scales<16>(load_f16(block), block + 66, 0.125f, to.scales);
    for (std::size_t i = 0; i < 32; ++i) {
      const std::size_t packed = number::load_raw<std::uint16_t>(block + 2 + 2 * i);
      const std::uint64_t mask = even_sign_masks[packed >> 9];
      store_codes(with_signs(iq2_xs_grid[packed & 511], mask), to.codes + 8 * i);
    }
  }
};

struct Iq2S : GridBlock {
  static constexpr std::size_t block_bytes = 82;
  static constexpr std::size_t run = 16;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    nibble_scales<16>(load_f16(block), block + 74, 0.125f, to.scales);
    const std::uint8_t* const low = octets(block) + 2;
    for (std::size_t i = 0; i < 32; ++i) {
      const std::size_t high = (low[64 + i / 4] >> (2 * (i % 4))) & 3u;
      const std::uint64_t mask = sign_masks[low[32 + i]];
      store_codes(with_signs(iq2_s_grid[low[i] | high << 8], mask), to.codes + 8 * i);
    }
  }
};

struct Iq3Xxs : GridBlock {
  static constexpr std::size_t block_bytes = 98;
  static constexpr std::size_t run = 32;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    std::array<std::uint8_t, 8> scales;
    const std::uint8_t* point = octets(block) + 2;
    for (std::size_t r = 0; r < 8; ++r) {
      const auto packed = number::load_raw<std::uint32_t>(block + 66 + 4 * r);
      scales[r] = static_cast<std::uint8_t>(packed >> 28);
      for (std::size_t i = 0; i < 4; ++i, point += 2) {
        const std::uint64_t mask = even_sign_masks[packed >> (7 * i) & 127u];
        const std::uint64_t bytes = both(iq3_xxs_grid[point[0]], iq3_xxs_grid[point[1]]);
        store_codes(with_signs(bytes, mask), to.codes + 32 * r + 8 * i);
      }
    }
    odd_scales(load_f16(block), scales, 0.25f, to.scales);
  }
};

struct Iq3S : GridBlock {
  static constexpr std::size_t block_bytes = 110;
  static constexpr std::size_t run = 32;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    nibble_scales<8>(load_f16(block), block + 106, 1.0f, to.scales);
    const std::uint8_t* const low = octets(block) + 2;
    for (std::size_t i = 0; i < 32; ++i) {
      const std::size_t highs = low[64 + i / 4] >> (2 * (i % 4));
      const std::uint64_t bytes = both(iq3_s_grid[low[2 * i] | (highs & 1) << 8],
                                       iq3_s_grid[low[2 * i + 1] | (highs & 2) << 7]);
      store_codes(with_signs(bytes, sign_masks[low[72 + i]]), to.codes + 8 * i);
    }
  }
};

// Returns a point in units of 1/8, with 1/8 added to each coordinate, or subtracted if `is_less`.
HWY_INLINE std::uint64_t shifted_point(std::size_t index, bool is_less) {
  const std::uint64_t two = is_less ? 0 : 0x0202020202020202u;
  return subtract_from_each(iq1_grid[index] + two, 9);
}

struct Iq1S : GridBlock {
  static constexpr std::size_t block_bytes = 50;
  static constexpr std::size_t run = 32;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    std::array<std::uint8_t, 8> scales;
    for (std::size_t r = 0; r < 8; ++r) {
      const std::size_t packed = number::load_raw<std::uint16_t>(block + 34 + 2 * r);
      scales[r] = packed >> 12 & 7u;
      for (std::size_t i = 0; i < 4; ++i) {
        const std::size_t index = octets(block)[2 + 4 * r + i] | (packed >> (3 * i) & 7u) << 8;
        store_codes(shifted_point(index, (packed & 0x8000u) != 0), to.codes + 32 * r + 8 * i);
      }
    }
    odd_scales(load_f16(block), scales, 0.125f, to.scales);
  }
};

struct Iq1M : GridBlock {
  static constexpr std::size_t block_bytes = 56;
  static constexpr std::size_t run = 16;
  static HWY_INLINE void unpack(const std::byte* block, Unpacked to) {
    std::array<std::uint8_t, 16> scales;
    unsigned scale = 0;
    for (std::size_t i = 0; i < 4; ++i) {
      const unsigned packed = number::load_raw<std::uint16_t>(block + 48 + 2 * i);
      scale |= packed >> 12 << (4 * i);
      for (std::size_t k = 0; k < 4; ++k) scales[4 * i + k] = packed >> (3 * k) & 7u;
    }
    const auto half = static_cast<std::uint16_t>(scale);
    odd_scales(std::bit_cast<float>(number::f32_from_f16(half)), scales, 0.125f, to.scales);
    for (std::size_t i = 0; i < 32; ++i) {
      const std::size_t high = nibble(block + 32, i);
      const std::size_t index = octets(block)[i] | (high & 7) << 8;
      store_codes(shifted_point(index, (high & 8) != 0), to.codes + 8 * i);
    }
  }
};

DecodeBlocks FindGrid(BlockFormat format, Dtype target, GgufMode mode) {
  switch (format) {
    case BlockFormat::iq2_xxs:
      return decoder_of<Iq2Xxs>(target, mode);
    case BlockFormat::iq2_xs:
      return decoder_of<Iq2Xs>(target, mode);
    case BlockFormat::iq2_s:
      return decoder_of<Iq2S>(target, mode);
    case BlockFormat::iq3_xxs:
      return decoder_of<Iq3Xxs>(target, mode);
    case BlockFormat::iq3_s:
      return decoder_of<Iq3S>(target, mode);
    case BlockFormat::iq1_s:
      return decoder_of<Iq1S>(target, mode);
    case BlockFormat::iq1_m:
      return decoder_of<Iq1M>(target, mode);
    default:
      return nullptr;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone::simd {

HWY_EXPORT(FindGrid);

DecodeBlocks grid_decoder(BlockFormat format, Dtype target, GgufMode mode) noexcept {
  return HWY_DYNAMIC_DISPATCH(FindGrid)(format, target, mode);
}

}  // namespace loadstone::simd
#endif
