// Reads a folder of torch.distributed.checkpoint (DCP) as one shard: its metadata, and the tensors
// that are assembled from the chunks in its files. Rules: docs/formats/dcp.md.
#pragma once

#include <memory>
#include <string>

#include "catalog/assembled_file.h"
#include "catalog/open_file.h"
#include "formats/file_header.h"

namespace loadstone {

struct DcpCheckpoint {
  FileHeader header;
  std::shared_ptr<const Assembly> assembly;
};

// Reads the file .metadata at `path`, and the header of each item. Throws Error "dcp.*", "ix.*",
// "pt.*", "io.*".
[[nodiscard]] DcpCheckpoint read_dcp(const FileOpener& opener, const std::string& path);

}  // namespace loadstone
