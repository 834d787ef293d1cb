// Any bytes as an index beside two shards: refused with an Error, or a catalog of those shards.
#include <string_view>

#include "fuzz/catalog_fuzz.h"

namespace {

using loadstone::fuzz::MemoryFile;

// 8 bytes of length, a header, one byte of data.
std::string shard(std::string_view name) {
  std::string header = R"({"?":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  header.replace(2, 1, name);
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(header.size());
  return bytes + header + "x";
}

// Thread-safe: it never changes.
class IndexedFolder final : public loadstone::Storage {
 public:
  explicit IndexedFolder(std::span<const std::uint8_t> index) : index_(index) {}

  [[nodiscard]] std::shared_ptr<loadstone::ByteSource> open(const std::string& path) override {
    if (path == "/m/model.safetensors.index.json") {
      return std::make_shared<MemoryFile>(path, index_);
    }
    const bool first = path == "/m/1.safetensors";
    if (!first && path != "/m/sub/2.safetensors") throw loadstone::Error("io.not_found", "none");
    const std::string& bytes = first ? first_ : second_;
    return std::make_shared<MemoryFile>(
        path, std::span(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()));
  }
  [[nodiscard]] loadstone::EntryKind kind(const std::string& path) override {
    return path == "/m" ? loadstone::EntryKind::folder : loadstone::EntryKind::file;
  }
  [[nodiscard]] std::vector<std::string> list(const std::string&) override {
    return {"model.safetensors.index.json"};
  }
  // A name that left the folder would be a defect, whatever it means.
  [[nodiscard]] std::string resolve(const std::string& path) override {
    if (path != "/m" && !path.starts_with("/m/")) std::abort();
    if (path.find("/../") != std::string::npos || path.ends_with("/..")) std::abort();
    return path;
  }

 private:
  std::span<const std::uint8_t> index_;
  std::string first_ = shard("a");
  std::string second_ = shard("b");
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  IndexedFolder storage({data, size});
  try {
    const auto catalog = loadstone::open_checkpoint("/m", {.storage = &storage});
    if (catalog->tensors().empty() || catalog->tensors().size() > 2) std::abort();
  } catch (const loadstone::Error&) {
    return 0;
  }
  return 0;
}
