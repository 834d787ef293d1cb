// The last transitions of a work folder: finished files get their names in the target. See
// docs/design/work-folder.md.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "convert/output.h"
#include "convert/sync_clock.h"
#include "convert/work_folder.h"
#include "loadstone/convert.h"
#include "loadstone/storage.h"

namespace loadstone {

// Syncs each folder below `root` that holds companion files.
void sync_folders(const Conversion& conversion, WritableStorage& storage, const std::string& root,
                  SyncClock& clock);

// For a target that is a folder. Not thread-safe.
class Commit {
 public:
  // All must live as long.
  Commit(const Conversion& conversion, WorkFolder& work, const TargetPlace& place,
         WritableStorage& storage, SyncClock& clock);

  // Takes one step if the file system and the target allow it, else goes file by file, the index
  // last.
  // After an Error the target is the older one.
  void run();

 private:
  void link_others();
  void name_files();
  void name_companion(const std::string& name);
  void name_shard(const std::string& name);
  void rename(const std::string& from, const std::string& to, std::function<void()> undo);
  template <typename Step>
  bool step(const Step& act, std::function<void()> undo);
  void take_back() noexcept;
  void sync_folder(const std::string& path) { clock_.sync_folder(storage_, path); }

  const Conversion& conversion_;
  WorkFolder& work_;
  const TargetPlace& place_;
  WritableStorage& storage_;
  SyncClock& clock_;
  std::vector<std::function<void()>> undo_;  // steps of name_files()
};

}  // namespace loadstone
