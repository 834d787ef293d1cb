// Checks that strided regions tile a range, so that they cover each element exactly once.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace loadstone {

struct RegionDim {
  std::uint64_t extent = 1;
  std::uint64_t stride = 1;
};

// Joins two dimensions, for join_neighbours().
[[nodiscard]] bool run_on(RegionDim& outer, const RegionDim& inner) noexcept;

// A set of positions: the offset plus any number of steps along each dimension. Value type.
struct Region {
  std::uint64_t offset = 0;
  std::vector<RegionDim> dims;
};

// Describes the defect; returns nullopt if the regions tile [0, elements). The regions must be
// inside this range, and their volumes must add up to `elements`.
[[nodiscard]] std::optional<std::string> tiling_defect(std::vector<Region> regions,
                                                       std::uint64_t elements);

}  // namespace loadstone
