#include "support/offload_values.h"

#include <simdjson.h>

#include <fstream>
#include <iterator>
#include <stdexcept>

#include "loadstone/catalog.h"

namespace loadstone::testing {

namespace fs = std::filesystem;

namespace {

Bytes read_part(const fs::path& path, std::uint64_t begin, std::uint64_t end) {
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(begin));
  Bytes bytes(end - begin);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error("the index names a missing file: " + path.string());
  return bytes;
}

Bytes value_in(const fs::path& path, std::string_view name, std::string_view dtype) {
  const auto catalog = open_checkpoint(path.string());
  for (const TensorInfo& tensor : catalog->tensors()) {
    if (tensor.name != name) continue;
    if (parse_dtype(dtype) != tensor.encoding.dtype()) {
      throw std::runtime_error("the dtypes of index and file differ");
    }
    return read_part(path, tensor.offset_begin, tensor.offset_end);
  }
  throw std::runtime_error("the index names a tensor that is not in its file");
}

}  // namespace

std::map<std::string, Bytes> offload_values(const fs::path& folder) {
  std::map<std::string, Bytes> values;
  if (!fs::exists(folder / "index.json")) return values;
  simdjson::dom::parser parser;
  for (const auto& [key, entry] : parser.load((folder / "index.json").string()).get_object()) {
    const std::string name(key);
    std::string_view file;
    if (entry["safetensors_file"].get_string().get(file) != simdjson::SUCCESS) {
      const fs::path path = folder / (name + ".dat");
      values[name] = read_part(path, 0, fs::file_size(path));
    } else if (fs::path(file).parent_path() == fs::canonical(folder)) {
      values[name] = value_in(fs::path(file), std::string_view(entry["weight_name"]),
                              std::string_view(entry["dtype"]));
    }
  }
  return values;
}

}  // namespace loadstone::testing
