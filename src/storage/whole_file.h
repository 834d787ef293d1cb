// Writes text files at paths that users choose: plans, pages, receipts, skeletons, recipes.
#pragma once

#include <string>
#include <string_view>

#include "loadstone/storage.h"

namespace loadstone {

// Writes the file under a temporary name in the same folder, syncs it to disk and renames it, so
// that a full disk or a killed process leaves the old file unchanged. Follows links and keeps
// permissions. Writes in place to pipes, devices and descriptors (/dev/stdout), to a mount point,
// and to a file in a folder that allows no new file. Throws Error "io.write", "io.no_space",
// "io.denied", and "io.remote" for a URL.
void write_whole_file(const std::string& path, std::string_view text,
                      WritableStorage& storage = local_storage().writable());

}  // namespace loadstone
