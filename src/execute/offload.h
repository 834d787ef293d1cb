// The offload folder in the layout that accelerate reads: <name>.dat with the raw bytes, and
// index.json that tells dtype and shape, or which safetensors file to look into.
// Described in docs/formats/offload-folder.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/plan.h"
#include "loadstone/storage.h"

namespace loadstone {

// A member of index.json. With a safetensors_file nothing is written: the reader takes weight_name
// of it and casts that to dtype.
struct OffloadEntry {
  std::string target;
  std::string safetensors_file;  // absolute
  std::string weight_name;
  std::string_view dtype;
  Shape shape;
};

// One for each target that is offloaded, in the plan's order; for each part of a quantized one: the
// data has the target's name, the others that, a dot and theirs. Throws Error "plan.dtype" for a
// dtype that the layout does not have.
[[nodiscard]] std::vector<OffloadEntry> offload_entries(const Plan& plan, Storage& storage);

// Files under temporary names, as large as they will be, mapped into memory: what is written there
// costs no anonymous memory. commit() gives them their names; without it the folder ends as it was.
// Not thread-safe; the mapped memory may be written to by any thread.
class OffloadFolder {
 public:
  // Makes the files of all targets with Delivery::disk_write. Where there are none, a plan without
  // a folder needs none, and has no index either. Throws Error: "offload.name", "offload.index",
  // "plan.dtype", "io.no_space", "io.denied", "io.write".
  OffloadFolder(const Plan& plan, Storage& storage);
  OffloadFolder(const OffloadFolder&) = delete;
  OffloadFolder& operator=(const OffloadFolder&) = delete;
  ~OffloadFolder();

  // Where the target's value goes; null for targets that are not written, and for quantized ones.
  [[nodiscard]] std::byte* data(std::size_t target) const noexcept { return data_[target]; }
  // Where a quantized target's parts go; none for targets that are not written.
  [[nodiscard]] const std::vector<std::byte*>& parts(std::size_t target) const noexcept {
    return parts_[target];
  }
  // After the last write. All files get their names, or none.
  void commit();

 private:
  struct File {
    std::string path;            // the final one
    std::string temporary_path;  // where the new bytes are, or after an exchange the old ones
    std::byte* data = nullptr;
    std::uint64_t byte_count = 0;
    bool named = false;
    bool exchanged = false;  // another file stood there, and waits under the temporary name
  };

  void make_folder();
  File& add_file(const std::string& name);
  [[nodiscard]] std::byte* add_value(const std::string& name, std::uint64_t byte_count);
  void map(File& file, int descriptor, std::uint64_t byte_count);
  void write_index();
  [[nodiscard]] std::string index_text(const std::vector<OffloadEntry>& entries) const;
  void give_name(File& file);
  static void unmap(File& file) noexcept;
  void remove_all() noexcept;

  std::string folder_;
  bool made_folder_ = false;  // and none above it: an empty folder is left then
  bool committed_ = false;
  std::string index_;  // the text of the new index.json
  std::vector<File> files_;
  std::vector<std::byte*> data_;
  std::vector<std::vector<std::byte*>> parts_;
};

// The name of a dtype in that layout (numpy's, and torch's for what numpy does not have); empty:
// none.
[[nodiscard]] std::string_view offload_dtype_name(Dtype dtype) noexcept;

}  // namespace loadstone
