// Describes this machine, and the memory of this process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "loadstone/export.h"

namespace loadstone {

// Returns the memory that this process can still use: the kernel's available memory, or less if a
// control group or `ulimit -v` limits the process. Returns nullopt if the system does not report
// it.
[[nodiscard]] LOADSTONE_API std::optional<std::uint64_t> available_memory_bytes();

// Returns the part of the available memory that a computed device map may fill with tensors. The
// rest, 5 % and at least 1 GiB, is for the load itself and for other programs. Nullopt as above.
[[nodiscard]] LOADSTONE_API std::optional<std::uint64_t> mappable_memory_bytes();

struct ProcessMemory {
  std::uint64_t peak_bytes = 0;       // the largest resident set until now
  std::uint64_t anonymous_bytes = 0;  // private memory at present
  std::uint64_t file_bytes = 0;       // pages of mapped files at present, including the program's
};

// Returns zeros if the system does not report the figures.
[[nodiscard]] LOADSTONE_API ProcessMemory process_memory();

// Returns the model of the processor; empty if the system does not report it.
[[nodiscard]] LOADSTONE_API std::string processor_name();

}  // namespace loadstone
