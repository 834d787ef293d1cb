// Runs numbered jobs on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/thread_count.h"
#include "engine/run_team.h"
#include "loadstone/defaults.h"

namespace loadstone {

// Runs jobs, reports progress to the observer (which may be null), and stops at the first failure.
// Not thread-safe, although the jobs of one run() are executed in parallel.
class Jobs {
 public:
  // `threads`: 0 for one per core, at most defaults::verify_threads_max.
  Jobs(unsigned threads, Observer* observer, std::uint64_t bytes_total,
       std::uint64_t bytes_done = 0)
      : threads_(thread_count(threads, defaults::verify_threads_max)),
        observer_(observer),
        bytes_total_(bytes_total),
        bytes_done_(bytes_done) {}

  // Calls job(index, scratch) for each index below `count`. `scratch` belongs to the calling
  // thread.
  template <typename Job>
  void run(std::size_t count, const Job& job) {
    stop_ = false;  // the previous run sets it at its end
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

  // Runs one job, which gets no scratch memory.
  template <typename Work>
  void run_one(const Work& work) {
    run(1, [&](std::size_t, std::vector<std::byte>&) { work(); });
  }

  // Set when jobs should end early; their results are then unused.
  [[nodiscard]] std::atomic<bool>& stop() noexcept { return stop_; }
  // Adds to the bytes that jobs have read. Returns false if the job should end early.
  [[nodiscard]] bool goes_on(std::uint64_t bytes) noexcept {
    bytes_done_ += bytes;
    return !stop_;
  }
  [[nodiscard]] std::uint64_t bytes_done() const noexcept { return bytes_done_; }
  // Corrects the expected total of bytes, for example after a job that read fewer than expected.
  void expect_total(std::uint64_t bytes) noexcept { bytes_total_ = bytes; }
  void expect_instead(std::uint64_t expected, std::uint64_t actual) noexcept {
    bytes_total_ += actual - expected;
  }

 private:
  const unsigned threads_;
  Observer* const observer_;
  std::atomic<std::uint64_t> bytes_total_;
  std::atomic<std::uint64_t> bytes_done_;
  std::atomic<bool> stop_ = false;
};

}  // namespace loadstone
