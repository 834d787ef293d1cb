// Resources of this machine and this process, and whether a plan fits them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "loadstone/export.h"
#include "loadstone/finding.h"
#include "loadstone/plan.h"

namespace loadstone {

// Returns the memory that this process can still use: the kernel's available memory, or less if a
// control group limits the process. Returns nullopt if the system does not report it.
[[nodiscard]] LOADSTONE_API std::optional<std::uint64_t> available_memory_bytes();

struct ProcessMemory {
  std::uint64_t peak_bytes = 0;       // the largest resident set until now
  std::uint64_t anonymous_bytes = 0;  // now: private memory
  std::uint64_t file_bytes = 0;       // now: pages of mapped files, including the program's
};

// Returns zeros if the system does not report the figures.
[[nodiscard]] LOADSTONE_API ProcessMemory process_memory();

// Compares a plan with this machine as it is now: error "memory.host" if the load would allocate
// more than the free memory, error "io.no_space" if the disk of the offload folder has too little
// room. Figures that the system does not report are not compared. A saved plan holds no such
// finding.
// `memory_bytes`: host memory that the load will allocate; 0: do not compare.
[[nodiscard]] LOADSTONE_API std::vector<Finding> machine_findings(const Plan& plan,
                                                                  std::uint64_t memory_bytes);

}  // namespace loadstone
