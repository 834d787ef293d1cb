// Reads arbitrary bytes as the metadata of a DCP checkpoint with one data file: expects an Error,
// or a catalog whose tensors can be read.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "catalog/assembled_file.h"
#include "fuzz/folder.h"
#include "loadstone/catalog.h"
#include "loadstone/error.h"
#include "support/torch_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  loadstone::fuzz::Folder storage;
  storage.add_file("/m/.metadata", {reinterpret_cast<const char*>(data), size});
  // The data file contains an item of [2, 2] values in F32 twice.
  const std::string item = loadstone::test::torch_bytes(loadstone::test::pickle::tensor());
  storage.add_file("/m/__0_0.distcp", item + item);
  storage.add_file("/m/__1_0.distcp", item + item);
  try {
    const auto catalog = loadstone::open_checkpoint("/m", {.storage = &storage});
    const auto source = loadstone::open_shard(storage, *catalog, 0);
    for (const loadstone::TensorInfo& tensor : catalog->tensors()) {
      if (tensor.offset_begin > tensor.offset_end) std::abort();
      // Items share no bytes, so a tensor cannot be larger than the files.
      if (tensor.byte_count() > 1 << 16) std::abort();
      std::vector<std::byte> bytes(tensor.byte_count());
      source->read(tensor.offset_begin, std::span(bytes));
    }
    if (to_json(*catalog).empty() || to_table(*catalog, true).empty()) std::abort();
  } catch (const loadstone::Error&) {
    return 0;
  }
  return 0;
}
