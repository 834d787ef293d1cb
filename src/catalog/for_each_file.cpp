#include "catalog/for_each_file.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "base/team.h"
#include "loadstone/defaults.h"
#include "storage/stop.h"

namespace loadstone {

namespace {

// Opens files in several threads, in ascending order. Used once.
class ConcurrentOpening {
 public:
  ConcurrentOpening(std::size_t count, const std::function<void(std::size_t)>& open)
      : open_(open), end_(count) {}

  void run(Storage& storage, unsigned threads) {
    Team team(stop_);
    team.start(threads, [this] { work(); });
    team.wait([&] {
      storage.require_wanted();
      return true;
    });
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  void work() {
    while (!stop_) {
      const std::size_t file = next_++;
      if (file >= end_) return;
      const IsStopped is_unwanted = [this, file] { return stop_ || file > end_; };
      const StopScope scope(is_unwanted);
      try {
        open_(file);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (file >= end_) continue;
        end_ = file;
        failure_ = std::current_exception();
      }
    }
  }

  const std::function<void(std::size_t)>& open_;
  std::atomic<std::size_t> next_ = 0;
  std::atomic<std::size_t> end_;  // the lowest file that failed, or the number of files
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::exception_ptr failure_;  // failure of the file `end_`; mutex_ guards both
};

}  // namespace

void for_each_file(Storage& storage, std::size_t count, unsigned at_once,
                   const std::function<void(std::size_t)>& open) {
  if (at_once == 0 || count < 2) {
    for (std::size_t file = 0; file < count; ++file) open(file);
    return;
  }
  const std::size_t threads = std::min<std::size_t>({at_once, count, defaults::threads_most});
  ConcurrentOpening(count, open).run(storage, static_cast<unsigned>(threads));
}

}  // namespace loadstone
