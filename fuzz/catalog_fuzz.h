// What the targets of all file formats do with their bytes.
#pragma once

#include <cstdlib>
#include <string>

#include "fuzz/memory_file.h"
#include "loadstone/catalog.h"

namespace loadstone::fuzz {

// Opens the bytes as a file of that name. An Error is an answer; what a catalog then claims must
// lie inside the file, and showing it must not fail.
inline int open_as(const std::string& name, std::span<const std::uint8_t> bytes) {
  MemoryStorage storage(name, bytes);
  try {
    const auto catalog = open_checkpoint(name, {.storage = &storage});
    for (const TensorInfo& tensor : catalog->tensors()) {
      if (tensor.offset_begin > tensor.offset_end || tensor.offset_end > bytes.size()) std::abort();
    }
    if (to_json(*catalog).empty() || to_table(*catalog, true).empty()) std::abort();
  } catch (const Error&) {
    return 0;
  }
  return 0;
}

}  // namespace loadstone::fuzz
