// Data files of an offload folder, and the runs that own them.
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

// Files of an offload folder, as accelerate names them: NAME.dat holds a raw value.
inline constexpr const char* offload_index_file = "index.json";
inline constexpr const char* offload_raw_ending = ".dat";

// Names of the files that one run makes in an offload folder; `run` is random.
[[nodiscard]] std::string offload_lock_name(std::string_view run);   // locked during the run
[[nodiscard]] std::string offload_index_name(std::string_view run);  // until it is the index
[[nodiscard]] std::string offload_data_name(std::string_view run, std::size_t number, bool is_raw);

// Returns true if the libraries' readers of offload folders support the dtype.
[[nodiscard]] bool is_readable_offload(Dtype dtype) noexcept;

struct OffloadValue {
  std::string name;
  Dtype dtype = Dtype::u8;
  Shape shape{};
  std::uint64_t byte_count = 0;
  std::byte* data = nullptr;  // in the file's memory, once it is made
};

// One new file, as large as it will be, in memory that needs no room of the process: a safetensors
// file of some values, or the raw bytes of one. Not thread-safe; values may be written to by any
// thread.
class OffloadFile {
 public:
  // Throws Error "io.no_space", "io.denied", "io.write"; then the file is not there.
  OffloadFile(WritableStorage& storage, std::string path, std::vector<OffloadValue> values,
              bool is_raw);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] bool is_raw() const noexcept { return is_raw_; }
  [[nodiscard]] std::vector<OffloadValue>& values() noexcept { return values_; }
  // After the last write: the header, and all of it to the disk. Throws Error "io.write".
  void finish();

 private:
  [[nodiscard]] std::string header_text() const;

  std::string path_;
  bool is_raw_;
  std::vector<OffloadValue> values_;  // in the file's order
  std::uint64_t header_bytes_ = 0;
  std::unique_ptr<FileSink> sink_;
  std::span<std::byte> memory_;
};

// An index that is there.
struct OffloadIndex {
  std::vector<std::pair<std::string, std::string>> members;  // names, with JSON values
  std::set<std::string> files;                               // that they name, without folders
  std::set<std::string> raw_names;                           // whose values are in NAME.dat
};

// Empty without an index. Throws Error "offload.index" for an invalid one.
[[nodiscard]] OffloadIndex read_offload_index(WritableStorage& storage, const std::string& path);

// Removes files of interrupted runs. The folder must be locked. Without locks in the file system
// running processes cannot be detected, so all files stay.
void remove_stale_offload(WritableStorage& storage, const std::string& folder,
                          const OffloadIndex& index);

// Returns true if a run made this file for values.
[[nodiscard]] bool is_offload_data_name(std::string_view name) noexcept;

}  // namespace loadstone
