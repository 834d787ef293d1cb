// Reads arbitrary bytes as an index of two shards: expects an Error, or a catalog of these shards.
#include <cstdint>
#include <string>
#include <string_view>

#include "fuzz/folder.h"
#include "loadstone/catalog.h"
#include "loadstone/error.h"

namespace {

// Returns a safetensors file: the header's length in 8 bytes, the header, and one byte of data.
std::string shard(std::string_view name) {
  std::string header = R"({"?":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  header.replace(2, 1, name);
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  return bytes + header + "x";
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  loadstone::fuzz::Folder storage;
  storage.add_file("/m/model.safetensors.index.json", {reinterpret_cast<const char*>(data), size});
  storage.add_file("/m/1.safetensors", shard("a"));
  storage.add_file("/m/sub/2.safetensors", shard("b"));
  try {
    const auto catalog = loadstone::open_checkpoint("/m", {.storage = &storage});
    if (catalog->tensors().empty() || catalog->tensors().size() > 2) std::abort();
  } catch (const loadstone::Error&) {
    return 0;
  }
  return 0;
}
