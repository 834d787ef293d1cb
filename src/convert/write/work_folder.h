// The folder for a target's files until all are complete, so that an interrupted run can be resumed
// and several processes can share the work.
//
//   .loadstone-NAME.part/lock              held by every process that works here; parts share it
//                        state.lock        held while a part reads or writes the state
//                        part-00002.lock   held by the process that does this part
//                        state.json        the conversion and its sources
//                        record            the complete output, see finished.h
//                        SHARD.unfinished-*
//                        SHARD.receipt.json     digests of a shard and of its sources
//                        files/            complete shards under their own names, synced to disk;
//                                          becomes the target
//                        exchange          exists while `files` and the target are exchanged
//                        old/              the old target, for a moment, if the file system cannot
//                                          exchange folders in one step
//                        older/            the files of an older output, for a moment, if the
//                                          target's files are replaced one at a time
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "convert/write/output.h"
#include "convert/write/receipts.h"
#include "convert/write/state.h"
#include "convert/write/target.h"
#include "convert/write/work_locks.h"
#include "loadstone/convert.h"
#include "loadstone/storage.h"

namespace loadstone {

// Part of the names of files that are being written.
inline constexpr std::string_view unfinished_mark = ".unfinished-";

// State that an interrupted run left; see docs/design/work-folder.md.
enum class WorkStage : std::uint8_t {
  begun,      // finished shards wait in `files`
  committed,  // the target is complete: this folder must be removed
  lost,       // `files` is missing or is the old target, and the target is a different folder
};

// Not thread-safe, except for const members.
class WorkFolder {
 public:
  // Creates or takes over the folder, and locks it for the lifetime of this object. Throws Error
  // "convert.locked", "convert.state", "convert.incomplete".
  WorkFolder(const Conversion& conversion, const TargetPlace& place, const ConvertRun& run,
             WritableStorage& storage);
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;
  // Removes the folder, unless finished shards must be kept for a later run.
  ~WorkFolder();

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const std::string& files() const noexcept { return files_; }
  [[nodiscard]] const std::string& older() const noexcept { return older_; }
  // Returns a unique path for a file that is being written.
  [[nodiscard]] std::string unfinished(const std::string& name) const;
  // Returns true if `files` contains the shard: a plain file with the expected size and header.
  [[nodiscard]] bool has_finished(std::uint32_t file) const;
  // Returns the path of a finished shard's receipt.
  [[nodiscard]] std::string receipt_of(std::uint32_t file) const;
  // Checks a finished shard by its digests. If any run or part used a copy of a source, also checks
  // the source tensors that the shard was made of. The receipt has digests of `kind`; nullopt: of
  // any kind.
  [[nodiscard]] KeptFile kept(std::uint32_t file, std::optional<DigestKind> kind, Storage& storage,
                              const GoesOn& goes_on) const;
  // Returns the paths of this part's finished shards.
  [[nodiscard]] std::vector<std::string> finished_paths(const ConvertPart& part) const;
  // Returns true if an earlier run completed the target and left only this folder to remove.
  [[nodiscard]] bool was_committed() const noexcept { return stage_ == WorkStage::committed; }
  // Throws Error "convert.incomplete" that names the missing shards, or their parts. `left`: for
  // each file, true if no run has finished it. `reasons`: why finished files cannot be used.
  void require_finished(const std::vector<bool>& left,
                        const std::map<std::uint32_t, std::string>& reasons) const;

  // Exchanges `files` and the target. This takes one step or, if the file system cannot exchange
  // folders, three renames with the old target in `old` for a moment. If it throws an Error,
  // nothing is changed.
  void exchange();
  // Removes the files in `older` after the target is complete.
  void forget_older();
  // Removes the folder after the target is complete. Sets unknown files aside.
  void remove() noexcept;

 private:
  void recover_old();
  [[nodiscard]] bool recover_older();
  void put_back_older();
  void divide_anew(std::uint32_t parts_before);
  void open_whole(const ConvertRun& run);
  void open_part(const ConvertPart& part);
  void begin();
  void make_files();
  void take_over(bool finishes);
  [[nodiscard]] WorkStage stage();
  void forget_exchange() noexcept;
  void put_back_old() noexcept;
  [[noreturn]] void refuse_nothing_done() const;
  void remove_named();
  [[nodiscard]] bool all_are_named() const;
  [[nodiscard]] bool exchange_is_done();
  [[nodiscard]] std::string exchange_text() const;
  [[nodiscard]] bool target_is_whole() const;
  [[nodiscard]] bool has_state() const;
  [[nodiscard]] WorkState read_state() const;
  void write_state();
  void remove_unfinished(const std::vector<bool>& wanted);
  [[nodiscard]] bool remove_modules(const WorkState& known);
  void empty_files(const WorkState& known);
  void clear();

  const Conversion& conversion_;
  TargetPlace place_;
  WritableStorage& storage_;
  const std::string path_;
  WorkLocks locks_;
  // Path of the file "exchange". Stored early, so that noexcept functions allocate no memory.
  const std::string exchange_;
  const std::string files_;
  const std::string old_;
  const std::string older_;
  const bool keeps_;       // true if finished shards are kept even if the run fails
  bool is_begun_ = false;  // true if this run created the contents
  bool is_removed_ = false;
  bool is_committed_ = false;  // true if `older` must not be moved back
  WorkStage stage_ = WorkStage::begun;
  WorkState state_;
};

// Returns true if the folder contains the shard: a plain file with the expected size and header.
[[nodiscard]] bool is_whole(WritableStorage& storage, const Conversion& conversion,
                            const std::string& folder, std::uint32_t file);

// Files that an earlier run finished and left in the work folder.
struct FinishedFiles {
  std::size_t of = 0;  // number of files, finished or not
  std::size_t count = 0;
  std::uint64_t bytes = 0;
  std::uint64_t bytes_left = 0;  // of the other files
};
// Looks at the files of a part; nullopt: at all files.
[[nodiscard]] FinishedFiles finished_files(WritableStorage& storage, const Conversion& conversion,
                                           const std::string& work,
                                           const std::optional<ConvertPart>& part);

// Returns the bytes of the files in the work folder that a run with these files would keep or
// remove.
[[nodiscard]] std::uint64_t bytes_waiting(WritableStorage& storage, const Conversion& conversion,
                                          const std::string& folder,
                                          const std::vector<bool>& wanted);

}  // namespace loadstone
