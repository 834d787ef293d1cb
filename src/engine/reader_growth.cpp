#include "engine/reader_growth.h"

#include <algorithm>

namespace loadstone {

namespace {

constexpr double period_seconds_min = 0.15;
constexpr std::uint64_t period_bytes_min = std::uint64_t{8} << 20;
// A rate that comes with half as many readers again, and is worth them.
constexpr double gain_least = 1.1;
// Readers that all have a core are waiting if they leave so much of it idle.
constexpr double idle_share_least = 0.3;

}  // namespace

bool ReaderGrowth::is_enough(const WorkPeriod& period) const noexcept {
  return period.seconds >= period_seconds_min && period.bytes >= period_bytes_min;
}

unsigned ReaderGrowth::after(const WorkPeriod& period) noexcept {
  const double rate = static_cast<double>(period.bytes) / period.seconds;
  const double usable = period.seconds * std::min(readers_, cores_);
  const bool waits = period.processor_seconds < (1 - idle_share_least) * usable;
  if (rate_before_ > 0 && rate < gain_least * rate_before_) {
    // From here on the disk is read, not the cache: earlier measurements do not apply.
    if (waits && !waited_before_) {
      rate_before_ = 0;
    } else {
      most_ = readers_;  // the last ones did not help
    }
    return readers_;
  }
  if (readers_ >= most_ || (readers_ >= cores_ && !waits)) {
    rate_before_ = 0;
    return readers_;
  }
  rate_before_ = rate;
  waited_before_ = waits;
  readers_ = std::min(most_, readers_ + std::max(1U, readers_ / 2));
  return readers_;
}

void ReaderGrowth::have(unsigned readers) noexcept {
  if (readers < readers_) most_ = readers;
  readers_ = readers;
}

}  // namespace loadstone
