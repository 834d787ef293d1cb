// When a file's bytes go straight to their place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "boxes/dims.h"

namespace loadstone {

// Shorter runs go through staging: a run has its price in the kernel too.
inline constexpr std::uint64_t direct_run_bytes_min = 4096;

// Whether a box that changes no bytes is read into its place: as one run, or as long ones. `dims`
// are sorted by source and joined.
[[nodiscard]] inline bool reads_directly(std::span<const BoxDim> dims,
                                         std::size_t element_bytes) noexcept {
  const InnerRun run = inner_run(dims);
  return run.outer_dims == 0 || run.elements >= direct_run_bytes_min / element_bytes;
}

// Whether elements that stand one after the other in the source do not in the target, or the other
// way round, so that they are gathered. `dims` as above.
[[nodiscard]] inline bool transposes(std::span<const BoxDim> dims) noexcept {
  return dims.size() > 1 && (dims.back().source_stride != 1 || dims.back().target_stride != 1);
}

}  // namespace loadstone
