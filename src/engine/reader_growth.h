// The number of readers of a run: few at first, and more while that is faster.
#pragma once

#include <cstdint>

namespace loadstone {

// What all readers together did in a stretch of time.
struct WorkPeriod {
  double seconds = 0;
  double processor_seconds = 0;  // of all threads of the process
  std::uint64_t bytes = 0;       // that got to their places
};

// Pure: it measures nothing itself. Where readers wait for a disk or a network, more of them keep
// more requests under way; where they copy, more of them use more cores. Neither is known
// beforehand, so another one is tried, and kept to while the rate grows.
class ReaderGrowth {
 public:
  ReaderGrowth(unsigned first, unsigned most, unsigned cores) noexcept
      : readers_(first), most_(most), cores_(cores) {}

  [[nodiscard]] unsigned readers() const noexcept { return readers_; }
  // Whether a period is long enough to tell anything.
  [[nodiscard]] bool is_enough(const WorkPeriod& period) const noexcept;
  // How many there should be after this period: never fewer than before.
  unsigned after(const WorkPeriod& period) noexcept;
  // So many there are: where the system gives no more, no more are wanted.
  void have(unsigned readers) noexcept;

 private:
  unsigned readers_;
  unsigned most_;
  unsigned cores_;
  double rate_before_ = 0;      // when some were added last; 0: none were
  bool waited_before_ = false;  // then
};

}  // namespace loadstone
