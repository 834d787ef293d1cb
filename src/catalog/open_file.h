// Opens files of a checkpoint: regular files only, and only links within the folder.
#pragma once

#include <memory>
#include <string>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

struct FileOpener {
  Storage& storage;
  bool allow_links = false;

  // `path` must resolve to a regular file below `folder`, or below the blobs/ of the hub cache that
  // `folder` is a snapshot of. Throws Error "ix.not_regular", "ix.path_escape", "io.*".
  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path,
                                                 const std::string& folder) const;
};

// Reads the header, by the format of the name's suffix or else of the content. Throws Error
// "format.unknown", and the format's errors.
[[nodiscard]] FileHeader read_header(ByteSource& source, std::uint32_t gguf_rank_max);

}  // namespace loadstone
