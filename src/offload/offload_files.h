// Manages the data files of an offload folder, and identifies the runs that own them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/dtype.h"
#include "loadstone/shape.h"
#include "loadstone/storage.h"

namespace loadstone {

// Names that accelerate defines for the files of an offload folder. NAME.dat contains the raw bytes
// of one value.
inline constexpr const char* offload_index_file = "index.json";
inline constexpr const char* offload_raw_ending = ".dat";

// Names of the files that one run makes in an offload folder. `run` is a random string.
[[nodiscard]] std::string offload_lock_name(std::string_view run);  // locked during the run
// Name of the index until it is renamed to index.json.
[[nodiscard]] std::string offload_index_name(std::string_view run);
[[nodiscard]] std::string offload_data_name(std::string_view run, std::size_t number, bool is_raw);

// Returns true if the readers of offload folders in accelerate and other libraries support the
// dtype.
[[nodiscard]] bool is_readable_offload(Dtype dtype) noexcept;

struct OffloadValue {
  std::string name;
  Dtype dtype = Dtype::u8;
  Shape shape{};
  std::uint64_t byte_count = 0;
  std::byte* data = nullptr;  // address in the mapped file, once the file has been made
};

// A new file, mapped into memory in its final size, so that values do not use the process's own
// memory. It is a safetensors file with several values, or the raw bytes of one value. Not
// thread-safe, but any thread may write to the values.
class OffloadFile {
 public:
  // Throws Error "io.no_space", "io.denied" or "io.write", after which the file does not exist.
  OffloadFile(WritableStorage& storage, std::string path, std::vector<OffloadValue> values,
              bool is_raw);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] bool is_raw() const noexcept { return is_raw_; }
  [[nodiscard]] std::vector<OffloadValue>& values() noexcept { return values_; }
  // Writes the header and syncs the file to disk. Call after the last write. Throws Error
  // "io.write".
  void finish();

 private:
  [[nodiscard]] std::string header_text() const;

  std::string path_;
  bool is_raw_;
  std::vector<OffloadValue> values_;  // in the order of the file
  std::uint64_t header_bytes_ = 0;
  std::unique_ptr<FileSink> sink_;
  std::span<std::byte> memory_;
};

// The content of an existing index.
struct OffloadIndex {
  std::vector<std::pair<std::string, std::string>> members;  // names with their JSON values
  std::set<std::string> files;      // file names in the members, without folders
  std::set<std::string> raw_names;  // names of values that are stored in NAME.dat
};

// Returns an empty index if the file does not exist. Throws Error "offload.index" for an invalid
// one.
[[nodiscard]] OffloadIndex read_offload_index(WritableStorage& storage, const std::string& path);

// Removes files that are not in the index: those of interrupted runs, and replaced ones, unless a
// model has locked the values of their run on a file other than `own_file`. The caller must have
// locked the folder. If the file system does not support locks, files of interrupted runs stay.
void remove_stale_offload(WritableStorage& storage, const std::string& folder,
                          const OffloadIndex& index, const std::string& own_file);

}  // namespace loadstone
