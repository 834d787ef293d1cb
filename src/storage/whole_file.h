// Text files that users name: plans, pages, receipts, skeletons, recipes.
#pragma once

#include <string>
#include <string_view>

#include "loadstone/storage.h"

namespace loadstone {

// Writes the file under a temporary name in the same folder, brings it to the disk and renames it,
// so a full disk or a killed process leaves the old file as it was. A link stays one, and the file
// that it leads to is replaced; permissions stay. Written in place: pipes, devices and descriptors
// (/dev/stdout), and a file whose folder takes no new one or that is a mount point itself.
// Throws Error "io.write", "io.no_space", "io.denied", and "io.remote" for a URL.
void write_whole_file(const std::string& path, std::string_view text,
                      WritableStorage& storage = local_storage().writable());

}  // namespace loadstone
