#include "engine/run_team.h"

#include <chrono>
#include <cstdint>
#include <ctime>
#include <exception>

#include "base/only_errors.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

double processor_seconds() noexcept {
  timespec now{};
  if (::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now) != 0) return 0;
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Measures work in periods: the time and the bytes since the previous period.
class PeriodClock {
 public:
  explicit PeriodClock(std::uint64_t bytes_done = 0) noexcept : bytes_done_(bytes_done) {}

  [[nodiscard]] WorkPeriod period(std::uint64_t bytes_done) const noexcept {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin_;
    return {seconds.count(), processor_seconds() - processor_begin_, bytes_done - bytes_done_};
  }

 private:
  std::uint64_t bytes_done_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  double processor_begin_ = processor_seconds();
};

}  // namespace

void run_team(ReaderGrowth& growth, std::atomic<bool>& stop, Observer* observer,
              const std::function<Progress()>& progress, const Team::Work& work) {
  Team team(stop);
  PeriodClock clock;
  growth.have(team.start(growth.readers(), work));
  const bool goes_on = team.wait([&] {
    const Progress now = progress();
    const WorkPeriod period = clock.period(now.bytes_done);
    if (growth.is_enough(period)) {
      const unsigned before = growth.readers();
      const unsigned wanted = growth.after(period) - before;
      if (wanted > 0) growth.have(before + team.add(wanted));
      clock = PeriodClock(now.bytes_done);
    }
    if (observer == nullptr) return true;
    const Inside inside(false);
    try {
      return observer->on_progress(now);
    } catch (...) {
      throw CallerException{std::current_exception()};
    }
  });
  if (!goes_on) throw Error("cancelled", "the caller stopped the operation");
}

void run_team(unsigned count, std::atomic<bool>& stop, Observer* observer,
              const std::function<Progress()>& progress, const Team::Work& work) {
  ReaderGrowth none(count, count, count);
  run_team(none, stop, observer, progress, work);
}

}  // namespace loadstone
