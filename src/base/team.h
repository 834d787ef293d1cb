// Runs the threads of a load, a conversion, a verification or an open checkpoint. The threads end
// before the call that started them returns.
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

namespace loadstone {

// Runs the same work in several threads while the calling thread watches them. Not thread-safe.
class Team {
 public:
  using Work = std::function<void()>;
  // Starts one thread that does the work. Throws if the system cannot start another thread.
  using Starter = std::function<std::thread(Work)>;

  // `stop` ends the work early. The team sets it after a failure, and its owner may set it too.
  explicit Team(std::atomic<bool>& stop, Starter starter = start_thread);
  // Stops and joins the threads that are still running.
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Starts `count` threads, or as many as the system provides. Throws Error "memory.host" if it
  // provides none. Each thread calls `work` once; the first exception stops all threads. Returns
  // the number of threads.
  unsigned start(unsigned count, const Work& work);
  // Starts up to `count` more threads for the same work, if some threads are still working. May be
  // called from the `watch` function of wait(). Returns the number of started threads.
  unsigned add(unsigned count);
  // Calls `watch` about 20 times a second until all threads have ended, and once afterwards. If
  // `watch` returns false, the threads are stopped. Rethrows the first failure. Returns true if
  // `watch` always returned true.
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

}  // namespace loadstone
