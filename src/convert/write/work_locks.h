// Takes and releases the locks of a work folder.
#pragma once

#include <memory>
#include <string>

#include "loadstone/convert.h"
#include "loadstone/storage.h"

namespace loadstone {

// Locks that a process holds until the object is destroyed. Not thread-safe.
class WorkLocks {
 public:
  // `path`: the work folder, which take() creates.
  WorkLocks(WritableStorage& storage, const std::string& path) : storage_(storage), path_(path) {}

  // Takes the folder's lock, which parts share. A part also takes the lock of the state. Throws
  // Error "convert.locked" or "convert.target".
  void take(const ConvertRun& run);
  // Takes the lock of a part, and releases the lock of the state for the next part. Throws Error
  // "convert.locked".
  void take_part(const ConvertPart& part);
  // Makes the folder's lock exclusive. Returns false if a different part has the lock.
  [[nodiscard]] bool exclude_parts();
  void admit_parts();

 private:
  [[nodiscard]] bool take_state();

  WritableStorage& storage_;
  const std::string path_;
  std::unique_ptr<FileLock> folder_;
  std::unique_ptr<FileLock> state_;
  std::unique_ptr<FileLock> part_;
};

}  // namespace loadstone
