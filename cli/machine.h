// Reads resources of this machine and this process from Linux's /proc. Unavailable values are
// nullopt, and callers must work without them.
#pragma once

#include <cstdint>
#include <optional>

namespace loadstone::cli {

// Returns the memory that a load can still use: the kernel's available memory, or less if a control
// group limits this process.
[[nodiscard]] std::optional<std::uint64_t> available_memory_bytes();

struct ProcessMemory {
  std::uint64_t peak_bytes = 0;       // peak of the resident set
  std::uint64_t anonymous_bytes = 0;  // private memory in use now
  std::uint64_t file_bytes = 0;       // mapped file pages in use now, including the program's own
};

[[nodiscard]] ProcessMemory process_memory();

}  // namespace loadstone::cli
