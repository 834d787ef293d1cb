// Reads the directory of a zip archive, as far as torch's files need it: names and byte ranges of
// records. Rules and error codes: docs/formats/torch.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

struct ZipRecord {
  std::string name;
  std::uint64_t header_begin = 0;  // offset of the local header
  std::uint64_t data_begin = 0;
  std::uint64_t bytes = 0;     // size of the uncompressed data
  bool is_compressed = false;  // if true, the data cannot be read in place

  [[nodiscard]] std::uint64_t data_end() const noexcept { return data_begin + bytes; }
};

struct ZipDirectory {
  std::vector<ZipRecord> records;     // in the directory's order
  std::uint64_t directory_begin = 0;  // all records end before it
};

// Reads the directory and every local header, but no data. Checks that each record is inside the
// file, overlaps no other record, and has the same name in its local header. Throws Error "pt.zip",
// "pt.duplicate", "io.*".
[[nodiscard]] ZipDirectory read_zip_directory(ByteSource& source);

}  // namespace loadstone
