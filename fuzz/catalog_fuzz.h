// Defines the common part of the fuzz targets for file formats.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>

#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "support/memory_storage.h"

namespace loadstone::fuzz {

// Opens the bytes as a file with this name. An Error is a valid result. Otherwise the catalog's
// tensors must be inside the file, and the inspection of the catalog must not fail.
inline int open_as(const std::string& name, std::span<const std::uint8_t> bytes) {
  test::MemoryStorage storage;
  storage.add_file(name, std::string(bytes.begin(), bytes.end()));
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
