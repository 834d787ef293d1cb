// Reads a local file with pread, which uses no shared file position, so that any number of threads
// may read from one descriptor.
#pragma once

#include <sys/stat.h>

#include <memory>
#include <string>

#include "loadstone/storage.h"
#include "storage/descriptor.h"

namespace loadstone {

[[nodiscard]] std::shared_ptr<ByteSource> local_file(std::string path, Descriptor descriptor,
                                                     const struct stat& status);

}  // namespace loadstone
