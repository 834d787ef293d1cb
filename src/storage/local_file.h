// Reads a local file through pread, without a shared file position, so any number of threads may
// read one descriptor.
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
