// Decides the number of readers of a run: a few at first, and more while the rate increases.
#pragma once

#include <cstdint>

namespace loadstone {

// Work of all readers together during a period.
struct WorkPeriod {
  double seconds = 0;
  double processor_seconds = 0;  // CPU time of all threads of the process
  std::uint64_t bytes = 0;       // bytes that reached their destinations
};

// Decides from the measurements that it is given. If readers wait for a disk or a network, more
// readers keep more requests in flight. If readers copy, more readers use more cores. The situation
// is not known beforehand, so 50 % more readers are tried, and the number increases while the rate
// grows.
class ReaderGrowth {
 public:
  ReaderGrowth(unsigned first, unsigned most, unsigned cores) noexcept
      : readers_(first), most_(most), cores_(cores) {}

  [[nodiscard]] unsigned readers() const noexcept { return readers_; }
  // Returns true if a period is long enough for a decision.
  [[nodiscard]] bool is_enough(const WorkPeriod& period) const noexcept;
  // Returns the number of readers after this period: never fewer than before.
  unsigned after(const WorkPeriod& period) noexcept;
  // Sets the actual number of readers. If the system could not start the requested threads, no
  // further ones are requested.
  void have(unsigned readers) noexcept;

 private:
  unsigned readers_;
  unsigned most_;
  unsigned cores_;
  double rate_before_ = 0;      // rate before the last increase; 0: no increase yet
  bool waited_before_ = false;  // the readers waited in the previous period
};

}  // namespace loadstone
