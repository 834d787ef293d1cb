// The threads of a load, a conversion or a verification. They live no longer than the call that
// started them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "engine/reader_growth.h"
#include "loadstone/observer.h"

namespace loadstone {

// Runs the same work in several threads while the calling thread looks after them. Used from one
// thread.
class Team {
 public:
  using Work = std::function<void()>;
  // Starts one thread that does the work; throws if the system has none left.
  using Starter = std::function<std::thread(Work)>;

  // `stop` ends the work early: set after a failure, or by its owner.
  explicit Team(std::atomic<bool>& stop, Starter starter = start_thread);
  // Stops and joins what still runs.
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Starts `count` threads, or as many as the system provides: Error "memory.host" if none. Calls
  // `work` once in each; its first exception stops all. Returns the number of threads.
  unsigned start(unsigned count, const Work& work);
  // Starts more of them, as many as the system gives, for the same work, if some of them still
  // work. From wait()'s `watch` too. Returns how many.
  unsigned add(unsigned count);
  // Calls `watch` about 20 times a second until all threads have ended, and a last time afterwards;
  // false stops the threads. Rethrows the first failure. Returns true if `watch` never returned
  // false.
  bool wait(const std::function<bool()>& watch);

 private:
  static std::thread start_thread(Work work) { return std::thread(std::move(work)); }
  void run() noexcept;
  void join() noexcept;
  [[nodiscard]] std::error_code start_one();

  std::atomic<bool>& stop_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::size_t running_ = 0;     // guarded by mutex_
  std::exception_ptr failure_;  // guarded by mutex_
  const Starter starter_;
  Work work_;
  std::vector<std::thread> threads_;
};

// Does `work` in as many threads as `growth` requests; it is consulted during the work, and more
// threads join. `observer` (may be null) receives the progress. Rethrows the first failure; Error
// "cancelled" if the observer cancels, CallerException if it throws.
void run_team(ReaderGrowth& growth, std::atomic<bool>& stop, Observer* observer,
              const std::function<Progress()>& progress, const Team::Work& work);
// Runs the work in `count` threads.
void run_team(unsigned count, std::atomic<bool>& stop, Observer* observer,
              const std::function<Progress()>& progress, const Team::Work& work);

}  // namespace loadstone
