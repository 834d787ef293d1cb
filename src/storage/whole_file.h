// Text files that users name: plans, pages, receipts, skeletons, recipes.
#pragma once

#include <string>
#include <string_view>

#include "loadstone/storage.h"

namespace loadstone {

// Writes the file under a temporary name in the same folder, syncs it to disk and renames it, so a
// full disk or a killed process leaves the old file unchanged. Replaces the target of a link and
// keeps permissions. Writes in place to pipes, devices and descriptors (/dev/stdout), and to a file
// whose folder allows no new one or that is a mount point. Throws Error "io.write", "io.no_space",
// "io.denied", and "io.remote" for a URL.
void write_whole_file(const std::string& path, std::string_view text,
                      WritableStorage& storage = local_storage().writable());

}  // namespace loadstone
