// Opens files for reading, with the reasons why a file cannot be opened.
#pragma once

#include <sys/stat.h>

#include <string>

#include "storage/descriptor.h"

namespace loadstone {

// Throws Error "io.not_found", "io.denied" or "io.open" for the system's error number.
[[noreturn]] void fail_open(const std::string& path, int problem, const char* doing);

// A path with a NUL would be cut by the system; names from files can hold one.
void require_whole_path(const std::string& path);

// Opens a regular file and gets its status; closes idle descriptors of the pool if the process has
// none left. Never blocks on a pipe. Throws Error: those above, "io.not_regular".
[[nodiscard]] Descriptor open_regular(const std::string& path, struct stat& status);

}  // namespace loadstone
