// Numbered jobs on some threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/thread_count.h"
#include "engine/team.h"
#include "loadstone/defaults.h"

namespace loadstone {

// Reports to the observer, which may be null, and stops at the first failure. Not thread-safe; the
// jobs of one run run at the same time.
class Jobs {
 public:
  // `threads`: 0 for one per core, at most defaults::verify_threads_max.
  Jobs(unsigned threads, Observer* observer, std::uint64_t bytes_total,
       std::uint64_t bytes_done = 0)
      : threads_(thread_count(threads, defaults::verify_threads_max)),
        observer_(observer),
        bytes_total_(bytes_total),
        bytes_done_(bytes_done) {}

  // Calls job(index, scratch) for each index below `count`; the bytes are the thread's own.
  template <typename Job>
  void run(std::size_t count, const Job& job) {
    stop_ = false;  // the end of a run before has set it
    std::atomic<std::size_t> next = 0;
    run_team(
        static_cast<unsigned>(std::clamp<std::size_t>(count, 1, threads_)), stop_, observer_,
        [&] {
          return Progress{bytes_done_, bytes_total_};
        },
        [&] {
          std::vector<std::byte> scratch;
          for (std::size_t i = next++; i < count && !stop_; i = next++) job(i, scratch);
        });
  }

  // Runs one job, which has no separate memory.
  template <typename Work>
  void run_one(const Work& work) {
    run(1, [&](std::size_t, std::vector<std::byte>&) { work(); });
  }

  // Set when jobs should end early; their results are then unused.
  [[nodiscard]] std::atomic<bool>& stop() noexcept { return stop_; }
  // Jobs report the bytes they read; false: end early.
  [[nodiscard]] bool goes_on(std::uint64_t bytes) noexcept {
    bytes_done_ += bytes;
    return !stop_;
  }
  [[nodiscard]] std::uint64_t bytes_done() const noexcept { return bytes_done_; }

 private:
  const unsigned threads_;
  Observer* const observer_;
  const std::uint64_t bytes_total_;
  std::atomic<std::uint64_t> bytes_done_;
  std::atomic<bool> stop_ = false;
};

}  // namespace loadstone
