#include "kernels/gguf/grid_maps.h"

#include <algorithm>
#include <cassert>

#include "kernels/gguf/grid_data.h"

namespace loadstone::simd {

namespace {

// For each byte, the squared distance of its coordinates from the coordinates in the byte `half`.
// Coordinates are measured in codes.
template <class L>
std::array<std::uint8_t, 256> distances_of_bytes(std::uint32_t half) noexcept {
  std::array<std::uint8_t, 256> all{};
  for (std::uint32_t byte = 0; byte < all.size(); ++byte) {
    int sum = 0;
    for (std::size_t i = 0; i < L::dims / 2; ++i) {
      const auto a = static_cast<int>(byte >> (L::bits * i) & L::mask);
      const auto b = static_cast<int>(half >> (L::bits * i) & L::mask);
      sum += (a - b) * (a - b);
    }
    all[byte] = static_cast<std::uint8_t>(std::min(sum, 255));
  }
  return all;
}

// Stores a grid's map. For each place it keeps the neighbours at the `rings` least distances.
// `room` is the total number of neighbours.
template <class L, std::size_t point_count, std::size_t room>
class MapMemory {
 public:
  MapMemory(const std::array<std::uint16_t, point_count>& points, std::size_t rings) noexcept
      : points_(points) {
    indices_.fill(0);
    std::array<bool, L::places> is_point{};
    for (std::size_t i = 0; i < point_count; ++i) {
      indices_[L::place(points[i])] = static_cast<std::uint16_t>(i);
      is_point[L::place(points[i])] = true;
    }
    std::size_t end = 0;
    for (std::size_t place = 0; place < L::places; ++place) {
      starts_[place] = static_cast<std::uint32_t>(end);
      if (!is_point[place]) end = add_neighbours(L::packed(place), rings, end);
    }
    starts_[L::places] = static_cast<std::uint32_t>(end);
    assert(end == room);
  }

  [[nodiscard]] GridMap<L> map() const noexcept {
    return {indices_.data(), starts_.data(), neighbours_.data()};
  }

 private:
  // Appends the neighbours of a place to the list at `end`. Returns the new end.
  std::size_t add_neighbours(std::uint32_t packed, std::size_t rings, std::size_t end) noexcept {
    const auto low = distances_of_bytes<L>(packed & 255);
    const auto high = distances_of_bytes<L>(packed >> 8);
    constexpr std::size_t farthest = L::dims * (L::levels - 1) * (L::levels - 1);
    std::array<std::uint16_t, farthest + 1> counts{};
    const auto distance = [&](std::uint16_t point) -> std::size_t {
      return std::size_t{low[point & 255]} + high[point >> 8];
    };
    for (const std::uint16_t point : points_) ++counts[distance(point)];
    // For each distance, 1 + the offset of the next neighbour; 0 if the distance is not kept.
    std::array<std::size_t, farthest + 1> places{};
    std::size_t kept = 0;
    for (std::size_t i = 0; i <= farthest && kept < rings; ++i) {
      if (counts[i] == 0) continue;
      places[i] = end + 1;
      end += counts[i];
      ++kept;
    }
    for (const std::uint16_t point : points_) {
      std::size_t& place = places[distance(point)];
      if (place != 0) neighbours_[place++ - 1] = point;
    }
    for (; end % neighbour_step != 0; ++end) neighbours_[end] = neighbours_[end - 1];
    return end;
  }

  const std::array<std::uint16_t, point_count>& points_;
  std::array<std::uint16_t, L::places> indices_;
  std::array<std::uint32_t, L::places + 1> starts_;
  std::array<std::uint16_t, room> neighbours_;
};

}  // namespace

// The second argument of a constructor is the number of distances that ggml searches. The template
// argument `room` follows from the grid.

GridMap<Lattice8> iq2_xxs_map() noexcept {
  static const MapMemory<Lattice8, 256, 135360> memory(iq2_xxs_points, 2);
  return memory.map();
}

GridMap<Lattice8> iq2_xs_map() noexcept {
  static const MapMemory<Lattice8, 512, 203376> memory(iq2_xs_points, 2);
  return memory.map();
}

GridMap<Lattice8> iq2_s_map() noexcept {
  static const MapMemory<Lattice8, 1024, 69064> memory(iq2_s_points, 1);
  return memory.map();
}

GridMap<Lattice8> iq1_map() noexcept {
  static const MapMemory<Lattice8, 2048, 343304> memory(iq1_points, 3);
  return memory.map();
}

GridMap<Lattice4> iq3_xxs_map() noexcept {
  static const MapMemory<Lattice4, 256, 34304> memory(iq3_xxs_points, 2);
  return memory.map();
}

GridMap<Lattice4> iq3_s_map() noexcept {
  static const MapMemory<Lattice4, 512, 36456> memory(iq3_s_points, 3);
  return memory.map();
}

}  // namespace loadstone::simd
