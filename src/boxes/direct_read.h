// Decides whether a file's bytes are read directly to their destination.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "boxes/dims.h"

namespace loadstone {

// Shorter runs are read into staging memory, because each run of a read costs time in the kernel.
inline constexpr std::uint64_t direct_run_bytes_min = 4096;

// Returns true if a box without a cast is read directly to its destination: as a single run, or as
// long runs. `dims` must be sorted by source and joined.
[[nodiscard]] inline bool reads_directly(std::span<const BoxDim> dims,
                                         std::size_t element_bytes) noexcept {
  const InnerRun run = inner_run(dims);
  return run.outer_dims == 0 || run.elements >= direct_run_bytes_min / element_bytes;
}

// Returns true if elements that are adjacent in the source are not adjacent in the target, or the
// reverse. `dims` must be sorted by source and joined.
[[nodiscard]] inline bool transposes(std::span<const BoxDim> dims) noexcept {
  return dims.size() > 1 && (dims.back().source_stride != 1 || dims.back().target_stride != 1);
}

}  // namespace loadstone
