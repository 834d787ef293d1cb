#include "engine/team.h"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <new>
#include <system_error>
#include <utility>

#include "base/only_errors.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr auto watch_interval = std::chrono::milliseconds(50);

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

Team::Team(std::atomic<bool>& stop, Starter starter) : stop_(stop), starter_(std::move(starter)) {}

Team::~Team() {
  stop_ = true;
  join();
}

void Team::join() noexcept {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

// Allocates no memory, because a thread that runs out of memory could not report the error.
void Team::run() noexcept {
  const Inside inside(true);
  std::exception_ptr failure;
  try {
    work_();
  } catch (const std::bad_alloc&) {
    failure = out_of_memory();
  } catch (...) {
    failure = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  if (failure) {
    if (!failure_) failure_ = std::move(failure);
    stop_ = true;  // set last, so that a thread that stops because of it is not the first failure
  }
  --running_;
  ended_.notify_all();
}

std::error_code Team::start_one() {
  {
    const std::lock_guard lock(mutex_);
    ++running_;
  }
  std::error_code problem;
  try {
    threads_.push_back(starter_([this] { run(); }));
    return problem;
  } catch (const std::system_error& error) {
    problem = error.code();
  } catch (const std::bad_alloc&) {
    problem = std::make_error_code(std::errc::not_enough_memory);
  }
  const std::lock_guard lock(mutex_);
  --running_;
  return problem;
}

unsigned Team::start(unsigned count, const Work& work) {
  work_ = work;
  threads_.reserve(count);
  for (unsigned i = 0; i < count; ++i) {
    const std::error_code problem = start_one();
    if (!problem) continue;
    if (i != 0) return i;  // continue with fewer threads
    Where where;
    where.system_error = problem.value();
    throw Error("memory.host", "the system cannot start a thread", where);
  }
  return count;
}

unsigned Team::add(unsigned count) {
  {
    const std::lock_guard lock(mutex_);
    if (running_ == 0) return 0;
  }
  try {
    // Reserved first, because a started thread must be stored to be joined.
    threads_.reserve(threads_.size() + count);
  } catch (const std::bad_alloc&) {
    return 0;
  }
  unsigned added = 0;
  while (added < count && !start_one()) ++added;
  return added;
}

bool Team::wait(const std::function<bool()>& watch) {
  bool wanted = true;
  std::unique_lock lock(mutex_);
  while (running_ != 0) {
    ended_.wait_for(lock, watch_interval, [this] { return running_ == 0; });
    if (running_ == 0) break;
    lock.unlock();
    if (wanted && !watch()) {
      wanted = false;
      stop_ = true;
    }
    lock.lock();
  }
  const std::exception_ptr failure = failure_;
  lock.unlock();
  join();
  if (failure) std::rethrow_exception(failure);
  return wanted && watch();
}

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
