// Checks that strided regions tile a range: cover each of its elements exactly once.
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

// Needed by join_neighbours().
[[nodiscard]] bool run_on(RegionDim& outer, const RegionDim& inner) noexcept;

// A set of positions: offset + sum of steps. Value type.
struct Region {
  std::uint64_t offset = 0;
  std::vector<RegionDim> dims;
};

// Describes the defect; nullopt if the regions tile [0, elements). They must be inside, and their
// volumes must add up to `elements`.
[[nodiscard]] std::optional<std::string> tiling_defect(std::vector<Region> regions,
                                                       std::uint64_t elements);

}  // namespace loadstone
