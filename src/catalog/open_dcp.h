// The folder that torch.distributed.checkpoint (DCP) writes, as one shard: its metadata, and the
// tensors that are assembled from the pieces in its files. Rules: docs/formats/dcp.md.
#pragma once

#include <string>

#include "catalog/open_file.h"
#include "formats/file_header.h"

namespace loadstone {

// `path`: of the file .metadata. Reads it, and the header of each item. Throws Error "dcp.*",
// "ix.*", "pt.*", "io.*".
[[nodiscard]] FileHeader read_dcp(const FileOpener& opener, const std::string& path);

}  // namespace loadstone
