// Opens regular files for reading, and explains why a file cannot be opened.
#pragma once

#include <sys/stat.h>

#include <string>

#include "storage/descriptor.h"

namespace loadstone {

// Throws Error "io.not_found", "io.denied" or "io.open" for the system's error number. `doing`:
// message of "io.open".
[[noreturn]] void fail_open(const std::string& path, int problem, const char* doing);

// Throws Error for a path with a NUL, at which the system would cut it. Names from files may
// contain a NUL.
void require_whole_path(const std::string& path);

// Opens a regular file and gets its status. Closes idle descriptors of the pool if the process has
// none left. Never blocks on a pipe. Throws "io.not_regular", and the errors of the functions
// above.
[[nodiscard]] Descriptor open_regular(const std::string& path, struct stat& status);

}  // namespace loadstone
