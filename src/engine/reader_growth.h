// The number of readers of a run: few at first, and more while that is faster.
#pragma once

#include <cstdint>

namespace loadstone {

// The work of all readers together during a period.
struct WorkPeriod {
  double seconds = 0;
  double processor_seconds = 0;  // of all threads of the process
  std::uint64_t bytes = 0;       // that got to their places
};

// Pure: measures nothing itself. If readers wait for a disk or a network, more of them keep more
// requests in flight; if they copy, more of them use more cores. Neither is known beforehand, so
// half as many again are tried, and kept while the rate grows.
class ReaderGrowth {
 public:
  ReaderGrowth(unsigned first, unsigned most, unsigned cores) noexcept
      : readers_(first), most_(most), cores_(cores) {}

  [[nodiscard]] unsigned readers() const noexcept { return readers_; }
  // Returns true if a period is long enough for a decision.
  [[nodiscard]] bool is_enough(const WorkPeriod& period) const noexcept;
  // Returns the number of readers after this period: never fewer than before.
  unsigned after(const WorkPeriod& period) noexcept;
  // Sets the actual number: if the system provides no more threads, no more are requested.
  void have(unsigned readers) noexcept;

 private:
  unsigned readers_;
  unsigned most_;
  unsigned cores_;
  double rate_before_ = 0;      // before the last addition; 0: none
  bool waited_before_ = false;  // then
};

}  // namespace loadstone
