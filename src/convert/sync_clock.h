// The time in which something is brought to the disk.
#pragma once

#include <chrono>
#include <mutex>

#include "loadstone/storage.h"

namespace loadstone {

// Counts time in which at least one thread syncs. Thread-safe.
class SyncClock {
 public:
  template <typename Sync>
  void timed(const Sync& sync) {
    const Running running(*this);
    sync();
  }
  void sync_folder(WritableStorage& storage, const std::string& path) {
    timed([&] { storage.sync_folder(path); });
  }
  // When nobody syncs.
  [[nodiscard]] double seconds() const noexcept {
    return std::chrono::duration<double>(sum_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;

  class Running {
   public:
    explicit Running(SyncClock& clock) : clock_(clock) {
      const std::lock_guard lock(clock_.mutex_);
      if (clock_.syncs_++ == 0) clock_.begin_ = Clock::now();
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;
    ~Running() {
      const std::lock_guard lock(clock_.mutex_);
      if (--clock_.syncs_ == 0) clock_.sum_ += Clock::now() - clock_.begin_;
    }

   private:
    SyncClock& clock_;
  };

  std::mutex mutex_;
  unsigned syncs_ = 0;  // in flight; guarded by mutex_, as are these two
  Clock::time_point begin_;
  Clock::duration sum_{};
};

}  // namespace loadstone
