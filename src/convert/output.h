// The files of a conversion, under temporary names until all of them are whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "loadstone/convert.h"
#include "storage/new_file.h"

namespace loadstone {

// Where a target will stand.
struct TargetPlace {
  std::string path;    // without a slash at its end
  std::string parent;  // the folder that it is in
  bool exists = false;
  bool is_fixed = false;   // a folder whose name cannot be given to another one
  bool has_files = false;  // a folder that is not empty
  // That holds files and nothing else: those beside the model can be linked into a new one, and the
  // two be exchanged in one step.
  bool is_exchangeable = false;
  std::vector<std::string> others;  // its files that stay, when it is
  std::vector<std::string> older;   // an older output, that goes
};

// Whether a file is one that a conversion with this stem writes: the file, a shard or the index.
[[nodiscard]] bool is_output_name(const std::string& name, const std::string& stem);

// Looks at what stands there. Throws Error "convert.target" where it may not be written, and
// "io.not_found" where there is no folder to put it into.
[[nodiscard]] TargetPlace look_at_target(const Conversion& conversion, const std::string& target);

// Throws Error "io.no_space" where the file system has not so many bytes left.
void check_space(const TargetPlace& place, std::uint64_t byte_count);

// write() and finish() are thread-safe; commit() comes after them. Without it the destructor
// removes all that was made.
class Output {
 public:
  Output(const Conversion& conversion, TargetPlace place);
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output();

  // The file is made, with its header, when its first bytes come.
  void write(std::uint32_t file, std::uint64_t offset, std::span<const std::byte> bytes);
  // Nothing more will be written to this one: it goes to the disk.
  void finish(std::uint32_t file);

  // All files are finished: gives them their names, the index last. Returns their paths.
  std::vector<std::string> commit();

  [[nodiscard]] std::uint64_t bytes_written() const noexcept;

 private:
  struct File {
    std::string name;       // in the folder; that of the target where there is one file
    std::string part_path;  // as it is called until commit()
    Descriptor descriptor;
    bool is_made = false;
    bool is_named = false;
  };

  [[nodiscard]] int descriptor_of(std::uint32_t file);
  void make(File& file, std::uint64_t byte_count);
  void write_index();
  void name_in_folder();
  void link_others();
  void exchange_folders();
  void remove_all() noexcept;

  const Conversion& conversion_;
  TargetPlace place_;
  std::string folder_;       // that files are made in
  std::string part_folder_;  // one that was made for them, and becomes the target; else empty
  std::mutex mutex_;
  std::vector<std::string> links_;   // in the part folder
  std::vector<File> files_;          // guarded by mutex_ until all are finished
  std::uint64_t bytes_written_ = 0;  // guarded by mutex_
  bool committed_ = false;
};

}  // namespace loadstone
