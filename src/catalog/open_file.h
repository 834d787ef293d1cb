// Opens files of a checkpoint: only regular files and, by default, only links within the folder.
#pragma once

#include <memory>
#include <string>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

struct FileOpener {
  Storage& storage;
  bool allow_links = false;

  // `path` must resolve to a regular file. Unless `allow_links` is set, the file must be below
  // `folder`, or below the blobs/ of the hub cache that `folder` is a snapshot of. Throws Error
  // "ix.not_regular", "ix.path_escape", "io.*".
  [[nodiscard]] std::shared_ptr<ByteSource> open(const std::string& path,
                                                 const std::string& folder) const;
};

// Reads the header in the format of the file name's suffix, or else of the content. Throws Error
// "format.unknown", and the format's errors.
[[nodiscard]] FileHeader read_header(ByteSource& source, std::uint32_t gguf_rank_max);

}  // namespace loadstone
