// Resources of this machine and this process, from Linux's /proc. A figure that is unavailable is
// nullopt, and callers work without it.
#pragma once

#include <cstdint>
#include <optional>

namespace loadstone::cli {

// Returns memory that a load can still use: the kernel's available memory, or less if a control
// group limits this process.
[[nodiscard]] std::optional<std::uint64_t> available_memory_bytes();

struct ProcessMemory {
  std::uint64_t peak_bytes = 0;       // the largest resident set until now
  std::uint64_t anonymous_bytes = 0;  // now: private memory
  std::uint64_t file_bytes = 0;       // now: pages of mapped files, including the program's
};

[[nodiscard]] ProcessMemory process_memory();

}  // namespace loadstone::cli
