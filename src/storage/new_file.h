// Checks limits, reports errors and creates names for files that are being written.
#pragma once

#include <cstdint>
#include <string>

namespace loadstone {

// Throws Error "io.no_space", "io.denied" or "io.write" for the system's error number.
[[noreturn]] void fail_write(int problem, std::string message, std::string path);

// Returns true if this process may write a file of this size.
[[nodiscard]] bool may_grow_to(std::uint64_t byte_count) noexcept;
// Throws if the size exceeds the limit, because writing would raise a signal instead of an error.
void check_file_limit(std::uint64_t byte_count, const std::string& path);

// Returns 16 hexadecimal digits that are unique across processes, containers and machines.
[[nodiscard]] std::string random_name();
// ".loadstone-RANDOM.part"
[[nodiscard]] std::string unique_part_name();

}  // namespace loadstone
