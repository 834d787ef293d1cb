// Collects the storages of a torch file: flat arrays of values, of which the tensors are views.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "formats/torch_pickle.h"
#include "loadstone/dtype.h"

namespace loadstone {

struct TorchStorage {
  Dtype dtype = Dtype::u8;
  bool is_untyped = false;  // the storage has no dtype; each tensor declares its own
  std::uint64_t elements = 0;
  std::uint64_t bytes = 0;
  std::uint64_t file_begin = 0;  // set if is_found
  bool is_found = false;
};

using TorchStorages = std::map<std::string, TorchStorage, std::less<>>;

struct TorchFile {
  const std::string& path;
  std::uint64_t bytes;
  const Pickle& pickle;
  const TorchStorages& storages;
};

// Returns all storages of the pickle by key. Throws Error "pt.storage_type", "pt.storage_key",
// "pt.storage_size".
[[nodiscard]] TorchStorages collect_storages(const std::string& path, const Pickle& pickle);

}  // namespace loadstone
