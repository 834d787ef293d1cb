// The directory of a zip archive, as far as torch's files need it: names and places of records.
// Rules and codes: docs/formats/torch.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/file_header.h"
#include "loadstone/storage.h"

namespace loadstone {

struct ZipRecord {
  std::string name;
  std::uint64_t header_begin = 0;  // of its local header
  std::uint64_t data_begin = 0;
  std::uint64_t bytes = 0;     // of the data, when it is not compressed
  bool is_compressed = false;  // the data cannot be read in place

  [[nodiscard]] std::uint64_t data_end() const noexcept { return data_begin + bytes; }
};

struct ZipDirectory {
  std::vector<ZipRecord> records;     // in the directory's order
  std::uint64_t directory_begin = 0;  // all records end before it
};

// Reads the directory and every local header, but no data. Each record is then inside the file,
// separate from all others, with the same name in both places. Throws Error "pt.zip",
// "pt.duplicate", "io.*".
[[nodiscard]] ZipDirectory read_zip_directory(ByteSource& source);

}  // namespace loadstone
