#include "convert/write/work_locks.h"

#include <fmt/format.h>

#include <utility>

#include "loadstone/error.h"

namespace loadstone {

namespace {

[[noreturn]] void refuse_locked(const std::string& path, std::string message) {
  throw Error("convert.locked", std::move(message), {.path = path});
}

// Returns false if a different process has the lock. On file systems without locks it always
// succeeds.
bool take_lock(FileLock& lock, LockMode mode, bool waits = false) {
  return lock.take(mode, waits) != LockResult::busy;
}

}  // namespace

void WorkLocks::take(const ConvertRun& run) {
  constexpr int tries_max = 100;
  const std::string path = path_ + "/lock";
  for (int i = 0; i < tries_max; ++i) {
    storage_.make_folder(path_);
    const auto status = storage_.status(path_);
    if (!status) continue;  // the process that used it last has just removed it
    if (status->kind != EntryKind::folder) {
      throw Error("convert.target",
                  "another file or folder has the name that loadstone needs for unfinished files",
                  {.path = path_});
    }
    if (run.part && !take_state()) continue;
    auto file = storage_.open_lock(path);
    if (file == nullptr) continue;
    if (!take_lock(*file, run.part ? LockMode::shared : LockMode::exclusive)) {
      refuse_locked(path_, run.finish ? "another process is running a part of this conversion"
                                      : "another process is writing this target");
    }
    if (!file->is_named()) continue;
    folder_ = std::move(file);
    return;
  }
  refuse_locked(path_, "other processes repeatedly create and remove this target");
}

// Takes the lock of the state. Waits for it, because parts start at the same time and hold this
// lock only for a moment. Returns false if the folder was removed meanwhile.
bool WorkLocks::take_state() {
  const std::string path = path_ + "/state.lock";
  auto file = storage_.open_lock(path);
  if (file == nullptr) return false;
  static_cast<void>(take_lock(*file, LockMode::exclusive, true));
  if (!file->is_named()) return false;
  state_ = std::move(file);
  return true;
}

void WorkLocks::take_part(const ConvertPart& part) {
  state_.reset();
  const std::string path = fmt::format("{}/part-{:05}.lock", path_, part.index);
  part_ = storage_.open_lock(path);
  if (part_ == nullptr) refuse_locked(path_, "another process removed the folder");
  if (!take_lock(*part_, LockMode::exclusive)) {
    refuse_locked(path, fmt::format("another process is running part {}", part.index));
  }
}

bool WorkLocks::exclude_parts() {
  if (!take_lock(*folder_, LockMode::exclusive)) return false;
  if (!folder_->is_named()) refuse_locked(path_, "another process is writing this target");
  return true;
}

void WorkLocks::admit_parts() {
  if (!take_lock(*folder_, LockMode::shared) || !folder_->is_named()) {
    refuse_locked(path_, "another process is writing this target");
  }
}

}  // namespace loadstone
