// The threads of a verification.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/thread_count.h"
#include "engine/team.h"
#include "loadstone/defaults.h"
#include "loadstone/verify.h"

namespace loadstone {

// Runs numbered jobs on some threads, reports to the observer, and stops at the first failure.
// Not thread-safe; the jobs run at the same time.
class Jobs {
 public:
  Jobs(const VerifyOptions& options, std::uint64_t bytes_total)
      : options_(options), bytes_total_(bytes_total) {}

  // Calls job(index, scratch) for each index below `count`; the bytes are the thread's own.
  template <typename Job>
  void run(std::size_t count, const Job& job) {
    const std::size_t threads = thread_count(options_.threads, defaults::verify_threads_max);
    std::atomic<std::size_t> next = 0;
    run_team(
        static_cast<unsigned>(std::clamp<std::size_t>(count, 1, threads)), stop_, options_.observer,
        [&] {
          return Progress{bytes_done_, bytes_total_};
        },
        [&] {
          std::vector<std::byte> scratch;
          for (std::size_t i = next++; i < count && !stop_; i = next++) job(i, scratch);
        });
  }

  // Jobs report the bytes they read; false: end early.
  [[nodiscard]] bool goes_on(std::uint64_t bytes) noexcept {
    bytes_done_ += bytes;
    return !stop_;
  }
  [[nodiscard]] std::uint64_t bytes_done() const noexcept { return bytes_done_; }

 private:
  const VerifyOptions& options_;
  std::uint64_t bytes_total_;
  std::atomic<std::uint64_t> bytes_done_ = 0;
  std::atomic<bool> stop_ = false;
};

}  // namespace loadstone
