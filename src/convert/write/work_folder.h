// Where a target's files wait until all of them are whole, so that a run that was ended can be
// taken up again and several processes can share the work.
//
//   .loadstone-NAME.part/lock              held by whoever works here: a part shares it
//                        state.lock        held while a part looks at the state or writes it
//                        part-00002.lock   held by the process that does this part
//                        state.json        what is being written, of what
//                        SHARD.unfinished-*
//                        SHARD.receipt.json     digests of a shard and of what it is made of
//                        files/            shards under their own names, whole and on the disk;
//                                          the folder that becomes the target
//                        exchange          there while `files` and the target change places
//                        old/              the old target, for a moment, where they cannot do so in
//                                          one step
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "convert/write/output.h"
#include "convert/write/receipts.h"
#include "convert/write/state.h"
#include "convert/write/target.h"
#include "convert/write/work_locks.h"
#include "loadstone/convert.h"
#include "loadstone/storage.h"

namespace loadstone {

// The state that an ended run left, see docs/design/work-folder.md.
enum class WorkStage : std::uint8_t {
  begun,      // finished shards wait in `files`
  committed,  // the target is whole: this folder is to be removed
  lost,       // `files` is gone or the old target, and the target is another one
};

// Used from one thread, but for what is const.
class WorkFolder {
 public:
  // Makes the folder, or takes over what is in it, and holds its lock as long as it lives. Throws
  // Error "convert.locked", "convert.state", "convert.incomplete".
  WorkFolder(const Conversion& conversion, const TargetPlace& place, const ConvertRun& run,
             WritableStorage& storage);
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;
  // What was begun anew and did not come to its end is removed.
  ~WorkFolder();

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const std::string& files() const noexcept { return files_; }
  // A path that nobody else has, for a file that is not whole yet.
  [[nodiscard]] std::string unfinished(const std::string& name) const;
  // Whether the shard is here: a plain file with the size and the header that it should have.
  [[nodiscard]] bool has_finished(std::uint32_t file) const;
  // Where the receipt of a finished shard is.
  [[nodiscard]] std::string receipt_of(std::uint32_t file) const;
  // Reads a finished shard; if a run or a part of the work had a copy of the source, also the
  // shard's source tensors.
  [[nodiscard]] KeptFile kept(std::uint32_t file, DigestKind kind, Storage& storage,
                              const GoesOn& goes_on) const;
  // Of the shards of this part.
  [[nodiscard]] std::vector<std::string> finished_paths(const ConvertPart& part) const;
  // An earlier run was ended when the target had its name and only this folder was to be removed.
  [[nodiscard]] bool was_committed() const noexcept { return stage_ == WorkStage::committed; }
  // Throws Error "convert.incomplete" that names what is missing: shards, or the parts they are of.
  // `left`: files that no run has finished.
  void require_finished(const std::vector<bool>& left) const;

  // `files` and the target change places: in one step, or in three with the old target in `old`
  // for a moment where the file system cannot exchange. After an Error all is as before.
  void exchange();
  // The target is whole: nothing of this is needed any more. What nobody knew of is set aside.
  void remove() noexcept;

 private:
  void recover_old();
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
  void require_undivided() const;
  void check_named();
  [[nodiscard]] bool all_are_named() const;
  [[nodiscard]] bool exchange_is_done();
  [[nodiscard]] std::string exchange_text() const;
  [[nodiscard]] bool target_is_whole() const;
  [[nodiscard]] bool is_whole(const std::string& path, std::uint32_t file) const;
  [[nodiscard]] bool has_state() const;
  [[nodiscard]] WorkState read_state() const;
  [[nodiscard]] WorkState known_state() const;
  void write_state();
  void remove_unfinished(const std::vector<bool>& wanted);
  [[nodiscard]] bool remove_modules(const WorkState& known);
  void empty_files(const WorkState& known);
  void clear();

  const Conversion& conversion_;
  const TargetPlace place_;
  WritableStorage& storage_;
  const std::string path_;
  WorkLocks locks_;
  const std::string exchange_;  // a file; its path is made while there is memory
  const std::string files_;
  const std::string old_;
  const bool keeps_;       // what is finished stays, however the run ends
  bool is_begun_ = false;  // what is here was made by this run
  bool is_removed_ = false;
  WorkStage stage_ = WorkStage::begun;
  WorkState state_;
};

// The bytes in the folder that a run of these files would keep or remove.
[[nodiscard]] std::uint64_t bytes_waiting(WritableStorage& storage, const Conversion& conversion,
                                          const std::string& folder,
                                          const std::vector<bool>& wanted);

}  // namespace loadstone
