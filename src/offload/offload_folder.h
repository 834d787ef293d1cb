// Writes an offload folder. The only commit is the rename of index.json. Before it, the old index
// refers to the old values; after it, the new index refers to the new values, which are in files
// with new names.
#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/plan.h"
#include "loadstone/storage.h"
#include "offload/offload.h"
#include "offload/offload_files.h"

namespace loadstone {

// If commit() is not called, the folder is restored. Not thread-safe, but any thread may write to
// the memory of the values.
class OffloadFolder {
 public:
  // Creates the files for all targets with Delivery::disk_write. A plan without such targets and
  // without a folder creates nothing. Throws Error "offload.name", "offload.index", "plan.dtype",
  // "io.no_space", "io.denied" or "io.write". Removes the files of earlier runs whose values the
  // index no longer refers to, unless the run has a lock_values() on a file other than `own_file`.
  OffloadFolder(const Plan& plan, Storage& storage, std::string own_file = {});
  OffloadFolder(const OffloadFolder&) = delete;
  OffloadFolder& operator=(const OffloadFolder&) = delete;
  ~OffloadFolder();

  // Returns the memory of the target's components, or of its value if it is not quantized. Empty
  // for targets that are not written.
  [[nodiscard]] const std::vector<std::byte*>& parts(std::size_t target) const noexcept {
    return parts_[target];
  }

  // ---- Between the last write and commit(): changes that a library needs
  // Returns the value of a written entry.
  [[nodiscard]] std::span<const std::byte> value(const std::string& name);
  // Adds a value that the plan does not contain, and replaces an entry of the same name.
  void add(const std::string& name, Dtype dtype, Shape shape, std::span<const std::byte> bytes);
  void rename(const std::string& from, const std::string& to);
  void remove(const std::string& name);
  // Reinterprets the same bytes in another dtype.
  void retype(const std::string& name, Dtype dtype, Shape shape);
  // Makes `name` an entry with the value of `root`.
  void tie(const std::string& name, const std::string& root);

  // Returns a lock that prevents other runs from removing the written files, in this process and in
  // others. Null if there are no such files. Call before commit().
  [[nodiscard]] std::shared_ptr<FileLock> lock_values();
  // Syncs all files to disk, then renames the index. Keeps the folder's other entries.
  void commit();
  // Restores the folder and makes further commits impossible.
  void abandon() noexcept { remove_all(); }
  // Returns true once the new index is in place. commit() may still throw after that.
  [[nodiscard]] bool is_committed() const noexcept { return is_committed_; }

  // Returns the entries of the index, before or after commit().
  [[nodiscard]] std::vector<OffloadEntry> entries() const;
  // Time that commit() spent on syncing files to disk.
  [[nodiscard]] double sync_seconds() const noexcept { return sync_seconds_; }

 private:
  struct Place {
    const OffloadFile* file = nullptr;
    OffloadValue* value = nullptr;
  };

  struct Added {
    OffloadValue value;
    std::vector<std::byte> bytes;
  };

  void begin();
  void make_folder();
  void make_files(std::vector<OffloadValue> values);
  void make_file(std::vector<OffloadValue> values, bool is_raw);
  void make_values(const Plan& plan);
  void put(OffloadEntry entry);
  [[nodiscard]] OffloadEntry* entry_of(const std::string& name) noexcept;
  [[nodiscard]] OffloadEntry& required(const std::string& name);
  [[nodiscard]] OffloadValue& value_of(const std::string& name);
  void write_added();
  void name_raw_files();
  [[nodiscard]] std::string index_text(const OffloadIndex& known) const;
  void files_committed() noexcept;
  void remove_replaced(const OffloadIndex& known) noexcept;
  void end_run() noexcept;
  void remove_all() noexcept;

  [[nodiscard]] std::string index_path() const { return folder_ + "/" + offload_index_file; }

  const std::string folder_;
  const std::string own_file_;
  WritableStorage& storage_;
  std::string run_;  // empty until the run's lock file is made
  std::string lock_path_;
  std::string real_folder_;                // absolute, with links resolved
  std::vector<std::string> made_folders_;  // the outermost folder first
  bool is_active_ = false;
  bool is_committed_ = false;
  double sync_seconds_ = 0;
  std::unique_ptr<FileLock> run_lock_;
  std::vector<OffloadEntry> entries_;            // an entry with an empty target has been removed
  std::map<std::string, std::size_t> entry_of_;  // by target
  std::deque<OffloadFile> files_;
  std::vector<Added> added_;
  std::size_t added_bytes_ = 0;
  std::map<std::string, Place> places_;  // written values, by their original names
  std::vector<std::string> raw_named_;   // paths of raw files that this run has renamed
  std::vector<std::vector<std::byte*>> parts_;
};

}  // namespace loadstone
