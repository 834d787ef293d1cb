// Maps for encoding IQ1, IQ2 and IQ3: the index of each point of a grid, and for every other place
// of the lattice its neighbours, the nearest points of the grid.
//
// A place is packed like the points of grid_data.h: codes of coordinates in 16 bits, the first one
// lowest. A map is computed on first use, by one thread, in static memory; nothing is allocated.
// All six maps take 1.8 MB, the largest one 730 KB.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace loadstone::simd {

template <std::size_t coordinates, std::size_t codes>
struct Lattice {
  static constexpr std::size_t dims = coordinates;
  static constexpr std::size_t levels = codes;  // codes of a coordinate: 0 to levels - 1
  static constexpr unsigned bits = 16 / dims;   // bits per code
  static constexpr std::uint32_t mask = (1u << bits) - 1;
  static constexpr std::size_t half_places = [] {  // number of places per packed byte
    std::size_t count = 1;
    for (std::size_t i = 0; i < dims / 2; ++i) count *= levels;
    return count;
  }();
  static constexpr std::size_t places = half_places * half_places;

  // Converts a packed place to its index: places are numbered without gaps.
  static constexpr std::size_t place(std::uint32_t packed) noexcept {
    return numbers[packed & 255] + half_places * numbers[packed >> 8];
  }
  // Converts an index to the packed place.
  static constexpr std::uint32_t packed(std::size_t place) noexcept {
    std::uint32_t codes_of_all = 0;
    for (std::size_t i = 0; i < dims; ++i, place /= levels) {
      codes_of_all |= static_cast<std::uint32_t>(place % levels) << (bits * i);
    }
    return codes_of_all;
  }

 private:
  static constexpr auto numbers = [] {
    std::array<std::uint16_t, 256> all{};
    for (std::size_t byte = 0; byte < all.size(); ++byte) {
      std::size_t factor = 1;
      for (std::size_t i = 0; i < dims / 2; ++i, factor *= levels) {
        all[byte] = static_cast<std::uint16_t>(all[byte] + (byte >> (bits * i) & mask) * factor);
      }
    }
    return all;
  }();
};

using Lattice8 = Lattice<8, 3>;  // IQ1, IQ2
using Lattice4 = Lattice<4, 8>;  // IQ3

// The length of each list of neighbours is a multiple of this: the last neighbour is repeated.
inline constexpr std::size_t neighbour_step = 8;

template <class L>
struct GridMap {
  const std::uint16_t* indices;     // indices of the points, by place; 0 for other places
  const std::uint32_t* starts;      // offset of each place's neighbours, plus the end of the last
  const std::uint16_t* neighbours;  // packed places

  // Returns the index of a point.
  [[nodiscard]] std::uint32_t index(std::uint32_t packed) const noexcept {
    return indices[L::place(packed)];
  }
  // Returns the points at the least distances, the nearest first, and in the order of the grid if
  // they are equally near. Returns nothing if the place is itself a point.
  [[nodiscard]] std::span<const std::uint16_t> near(std::uint32_t packed) const noexcept {
    const std::size_t place = L::place(packed);
    return {neighbours + starts[place], neighbours + starts[place + 1]};
  }
};

[[nodiscard]] GridMap<Lattice8> iq2_xxs_map() noexcept;
[[nodiscard]] GridMap<Lattice8> iq2_xs_map() noexcept;
[[nodiscard]] GridMap<Lattice8> iq2_s_map() noexcept;
[[nodiscard]] GridMap<Lattice8> iq1_map() noexcept;
[[nodiscard]] GridMap<Lattice4> iq3_xxs_map() noexcept;
[[nodiscard]] GridMap<Lattice4> iq3_s_map() noexcept;

}  // namespace loadstone::simd
