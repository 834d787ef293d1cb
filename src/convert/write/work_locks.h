// The locks of a work folder.
#pragma once

#include <memory>
#include <string>

#include "loadstone/convert.h"
#include "loadstone/storage.h"

namespace loadstone {

// Locks of one process, held until the end. Not thread-safe.
class WorkLocks {
 public:
  // `path`: the folder, which take() creates.
  WorkLocks(WritableStorage& storage, const std::string& path) : storage_(storage), path_(path) {}

  // Takes the folder's lock, which parts share, and for a part also the state's. Throws Error
  // "convert.locked", "convert.target".
  void take(const ConvertRun& run);
  // Takes the part's lock and releases the state's to the next part. Throws Error "convert.locked".
  void take_part(const ConvertPart& part);
  // Makes the folder's lock exclusive. Returns false if another part has it.
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
