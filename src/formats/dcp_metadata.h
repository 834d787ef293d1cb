// Reads the file `.metadata` of torch.distributed.checkpoint (DCP) as data: the tensors, and the
// file that stores each chunk. Byte layout and rules: docs/formats/dcp.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/file_header.h"
#include "loadstone/dtype.h"
#include "loadstone/shape.h"
#include "loadstone/storage.h"

namespace loadstone {

inline constexpr std::string_view dcp_metadata_name = ".metadata";

// A rectangular part of a tensor, stored as one item of a file.
struct DcpChunk {
  std::vector<std::uint64_t> offsets;  // index of the chunk's first element in the tensor, by dim
  Shape sizes;
  std::uint32_t file = no_file;  // index into DcpMetadata::files
  std::uint64_t item_begin = 0;  // offset in the file
  std::uint64_t item_bytes = 0;

  static constexpr std::uint32_t no_file = UINT32_MAX;
};

struct DcpTensor {
  std::string name;
  Dtype dtype = Dtype::f32;
  Shape shape;
  // Non-empty chunks, which together contain each element of the tensor exactly once.
  std::vector<DcpChunk> chunks;
};

// An object that is not a tensor, as torch.save wrote it to an item.
struct DcpObject {
  std::string name;
  std::string file = {};  // a plain path below the folder; empty if unknown
  std::uint64_t item_begin = 0;
  std::uint64_t item_bytes = 0;
};

struct DcpMetadata {
  std::vector<DcpTensor> tensors;  // in the file's order
  std::vector<DcpObject> objects;
  std::vector<std::string> files;  // plain paths below the folder, in natural order
  std::vector<Finding> findings;
};

// Throws Error "dcp.*", "ix.path", "ix.path_escape", "pt.*", "io.*".
[[nodiscard]] DcpMetadata read_dcp_metadata(ByteSource& source);

}  // namespace loadstone
