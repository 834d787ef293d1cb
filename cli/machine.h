// What this machine and this process have and use. Linux's /proc; where a figure cannot be had it
// is nothing, and whoever asked does without.
#pragma once

#include <cstdint>
#include <optional>

namespace loadstone::cli {

// Memory that a load can still take: what the kernel says is available, or less where a control
// group limits this process.
[[nodiscard]] std::optional<std::uint64_t> available_memory_bytes();

struct ProcessMemory {
  std::uint64_t peak_bytes = 0;       // the largest resident set so far
  std::uint64_t anonymous_bytes = 0;  // now: memory of our own
  std::uint64_t file_bytes = 0;       // now: pages of mapped files, the program's own among them
};

[[nodiscard]] ProcessMemory process_memory();

}  // namespace loadstone::cli
