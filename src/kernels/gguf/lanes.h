// Types for values in lanes. See lanes_inl.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace loadstone::simd {

// Number of lanes of the widest vectors. Narrower vectors process the lanes in several steps.
inline constexpr std::size_t lane_count = 16;

// One value per lane.
using LaneNumbers = std::array<float, lane_count>;

// For each lane, the index of its run among 16 runs.
using LaneOrder = std::array<std::uint8_t, lane_count>;

// The first value of all lanes, then the second value of all lanes, and so on.
template <std::size_t run>
using LaneRows = std::array<float, run * lane_count>;
template <std::size_t run>
using LaneCodes = std::array<std::uint8_t, run * lane_count>;
template <std::size_t rows>
using LaneWords = std::array<std::int32_t, rows * lane_count>;

// Converts from the order of lanes to the order of runs. by_lane() converts back.
inline LaneNumbers by_run(const LaneNumbers& lanes, const LaneOrder& order) noexcept {
  LaneNumbers runs;
  for (std::size_t lane = 0; lane < lane_count; ++lane) runs[order[lane]] = lanes[lane];
  return runs;
}
inline LaneNumbers by_lane(const LaneNumbers& runs, const LaneOrder& order) noexcept {
  LaneNumbers lanes;
  for (std::size_t lane = 0; lane < lane_count; ++lane) lanes[lane] = runs[order[lane]];
  return lanes;
}

// Lane i contains run i.
inline constexpr LaneOrder order_of_runs = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

struct Fitted {
  alignas(64) LaneNumbers scales;
  alignas(64) LaneNumbers minima;  // magnitudes, which are subtracted; never negative
  alignas(64) LaneNumbers code_scales;
  alignas(64) LaneNumbers code_minima;
};

}  // namespace loadstone::simd
