// Parameters and block layouts for encoding IQ2 and IQ3. Factors and limits are ggml's.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/gguf/codes.h"
#include "kernels/gguf/grid_maps.h"
#include "kernels/gguf/lanes.h"
#include "kernels/gguf/scale_fits.h"

namespace loadstone::simd {

// The groups of a run for which the search chooses points again with the best scale.
enum class Refit : std::uint8_t {
  off_grid,    // only the groups whose codes were not a point
  all_of_run,  // all groups of a run in which some codes were not a point
  always
};

// Formulas for the weights of values without an importance.
enum class Unweighted : std::uint8_t { squares, quarter_of_mean_more };

// Results of the search for 16 runs.
template <std::size_t run, std::size_t dims>
struct GridCodes {
  static constexpr std::size_t groups = run / dims;
  alignas(64) LaneRows<run> numbers;  // magnitudes, but negative if the stored sign is flipped
  alignas(64) LaneRows<run> weights;
  alignas(64) LaneRows<run> roots;  // square roots of the weights
  alignas(64) LaneNumbers scales;
  alignas(64) LaneWords<run / 8> signs;
  alignas(64) LaneWords<groups> points;  // packed codes of coordinates
  alignas(64) LaneWords<groups> indices;
};

// ---- Constants of each format. GridFormat contains the defaults

struct GridFormat {
  static constexpr std::size_t elements = 256;
  static constexpr float smallest = smallest_fitted;  // runs of smaller magnitudes get scale 0
  static constexpr float candidate_step = 0.1f;
  static constexpr int candidates = 9;  // number of candidates on each side of the first one
  static constexpr float mean_factor = 2;
  static constexpr Unweighted unweighted = Unweighted::squares;
  static constexpr Refit refit = Refit::off_grid;
  static constexpr float scale_factor = 1;  // multiplies the block's scale before it is stored
  static constexpr bool fits_first = false;
  // True if blocks with scale 0 still store points and signs.
  static constexpr bool keeps_codes = false;
};

struct Iq2Format : GridFormat {
  using L = Lattice8;
};

struct Iq2XxsFormat : Iq2Format {
  static constexpr std::size_t block_bytes = 66;
  static constexpr std::size_t run = 32;
  static constexpr bool has_even_signs = true;
  static constexpr int candidates = 6;
  static constexpr float mean_factor = 1;
  static constexpr Refit refit = Refit::always;
  static constexpr bool fits_first = true;
  static GridMap<L> map() noexcept { return iq2_xxs_map(); }
};

struct Iq2XsFormat : Iq2Format {
  static constexpr std::size_t block_bytes = 74;
  static constexpr std::size_t run = 16;
  static constexpr bool has_even_signs = true;
  static constexpr float mean_factor = 1;
  static GridMap<L> map() noexcept { return iq2_xs_map(); }
};

struct Iq2SFormat : Iq2Format {
  static constexpr std::size_t block_bytes = 82;
  static constexpr std::size_t run = 16;
  static constexpr bool has_even_signs = false;
  static constexpr float smallest = 1e-8f;
  static constexpr Unweighted unweighted = Unweighted::quarter_of_mean_more;
  static constexpr float scale_factor = 0.9875f;
  static constexpr bool keeps_codes = true;
  static GridMap<L> map() noexcept { return iq2_s_map(); }
};

struct Iq3Format : GridFormat {
  using L = Lattice4;
  static constexpr std::size_t run = 32;
  static constexpr float candidate_step = 0.2f;
};

struct Iq3XxsFormat : Iq3Format {
  static constexpr std::size_t block_bytes = 98;
  static constexpr bool has_even_signs = true;
  static constexpr float smallest = 1e-8f;
  static constexpr int candidates = 15;
  static constexpr float scale_factor = 1.0125f;
  static GridMap<L> map() noexcept { return iq3_xxs_map(); }
};

struct Iq3SFormat : Iq3Format {
  static constexpr std::size_t block_bytes = 110;
  static constexpr bool has_even_signs = false;
  static constexpr float smallest = std::numeric_limits<float>::denorm_min();
  static constexpr Refit refit = Refit::all_of_run;
  static constexpr float scale_factor = 1.033f;
  static constexpr bool keeps_codes = true;
  static GridMap<L> map() noexcept { return iq3_s_map(); }
};

// ---- Packing. All bytes of a block must be 0 before

template <class Codes>
inline std::uint32_t index_at(const Codes& codes, std::size_t run, std::size_t group) noexcept {
  return static_cast<std::uint32_t>(codes.indices[group * lane_count + run]);
}

template <class Codes>
inline std::uint32_t signs_at(const Codes& codes, std::size_t run, std::size_t octet) noexcept {
  return static_cast<std::uint32_t>(codes.signs[octet * lane_count + run]);
}

inline void add_nibble(std::byte* bytes, std::size_t i, std::uint32_t value) noexcept {
  bytes[i / 2] |= static_cast<std::byte>(value << (4 * (i % 2)));
}

// Packs seven signs for each eight values, and the code of a scale.
template <class Codes>
inline std::uint32_t signs_and_scale(const Codes& codes, std::size_t run, int scale) noexcept {
  std::uint32_t packed = static_cast<std::uint32_t>(scale) << 28;
  for (std::size_t i = 0; i < 4; ++i) packed |= (signs_at(codes, run, i) & 127) << (7 * i);
  return packed;
}

inline void pack(Iq2XxsFormat /*format*/, const GridCodes<32, 8>& codes, std::size_t first,
                 const int* scales, std::byte* block) noexcept {
  for (std::size_t r = 0; r < 8; ++r) {
    std::byte* const to = block + 2 + 8 * r;
    for (std::size_t i = 0; i < 4; ++i) {
      to[i] = static_cast<std::byte>(index_at(codes, first + r, i));
    }
    number::store_raw(to + 4, signs_and_scale(codes, first + r, scales[r]));
  }
}

inline void pack(Iq2XsFormat /*format*/, const GridCodes<16, 8>& codes, std::size_t /*first*/,
                 const int* scales, std::byte* block) noexcept {
  for (std::size_t r = 0; r < 16; ++r) {
    add_nibble(block + 66, r, static_cast<std::uint32_t>(scales[r]));
    for (std::size_t i = 0; i < 2; ++i) {
      const std::uint32_t packed = index_at(codes, r, i) | (signs_at(codes, r, i) & 127) << 9;
      number::store_raw(block + 2 + 4 * r + 2 * i, static_cast<std::uint16_t>(packed));
    }
  }
}

inline void pack(Iq2SFormat /*format*/, const GridCodes<16, 8>& codes, std::size_t /*first*/,
                 const int* scales, std::byte* block) noexcept {
  for (std::size_t r = 0; r < 16; ++r) {
    add_nibble(block + 74, r, static_cast<std::uint32_t>(scales[r]));
    for (std::size_t i = 2 * r; i < 2 * r + 2; ++i) {
      const std::uint32_t index = index_at(codes, r, i % 2);
      block[2 + i] = static_cast<std::byte>(index);
      block[34 + i] = static_cast<std::byte>(signs_at(codes, r, i % 2));
      block[66 + i / 4] |= static_cast<std::byte>(index >> 8 << (2 * (i % 4)));
    }
  }
}

inline void pack(Iq3XxsFormat /*format*/, const GridCodes<32, 4>& codes, std::size_t first,
                 const int* scales, std::byte* block) noexcept {
  for (std::size_t r = 0; r < 8; ++r) {
    for (std::size_t i = 0; i < 8; ++i) {
      block[2 + 8 * r + i] = static_cast<std::byte>(index_at(codes, first + r, i));
    }
    number::store_raw(block + 66 + 4 * r, signs_and_scale(codes, first + r, scales[r]));
  }
}

inline void pack(Iq3SFormat /*format*/, const GridCodes<32, 4>& codes, std::size_t first,
                 const int* scales, std::byte* block) noexcept {
  for (std::size_t r = 0; r < 8; ++r) {
    add_nibble(block + 106, r, static_cast<std::uint32_t>(scales[r]));
    for (std::size_t i = 0; i < 8; ++i) {
      const std::uint32_t index = index_at(codes, first + r, i);
      block[2 + 8 * r + i] = static_cast<std::byte>(index);
      block[66 + r] |= static_cast<std::byte>(index >> 8 << i);
    }
    for (std::size_t i = 0; i < 4; ++i) {
      block[74 + 4 * r + i] = static_cast<std::byte>(signs_at(codes, first + r, i));
    }
  }
}

// Stores one block. `first` is the index of its first run in `codes`.
template <class Format, class Codes>
inline void store_block(const Codes& codes, std::size_t first, std::byte* block) noexcept {
  constexpr std::size_t runs = Format::elements / Format::run;
  const float* const scales = codes.scales.data() + first;
  const float most = *std::max_element(scales, scales + runs);
  std::fill_n(block, Format::block_bytes, std::byte{});
  std::array<int, runs> scale_codes{};
  if (most == 0 && !Format::keeps_codes) return;
  if (most != 0) {
    const float scale = most / 31;
    const float inverse = 1 / scale;
    store_f16(block, scale * Format::scale_factor);
    for (std::size_t i = 0; i < runs; ++i) {
      scale_codes[i] = std::clamp(nearest_integer(0.5f * (inverse * scales[i] - 1)), 0, 15);
    }
  }
  pack(Format(), codes, first, scale_codes.data(), block);
}

}  // namespace loadstone::simd
