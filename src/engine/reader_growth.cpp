#include "engine/reader_growth.h"

#include <algorithm>

namespace loadstone {

namespace {

constexpr double period_seconds_min = 0.15;
constexpr std::uint64_t period_bytes_min = std::uint64_t{8} << 20;
// Minimum increase of the rate that justifies 50 % more readers.
constexpr double gain_least = 1.1;
// If readers leave at least this share of their cores idle, they are waiting for I/O.
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
    // The readers have begun to wait for the disk instead of reading from the page cache, so
    // earlier rates no longer apply.
    if (waits && !waited_before_) {
      rate_before_ = 0;
    } else {
      most_ = readers_;  // the last added readers did not help
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
