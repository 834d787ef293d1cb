#include "execute/team.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>
#include <utility>

#include "base/only_errors.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr auto watch_interval = std::chrono::milliseconds(50);

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

// Allocates nothing: a thread that finds no memory here could not say so.
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
    stop_ = true;  // after that, so that nobody who stops for it is taken for the first
  }
  --running_;
  ended_.notify_all();
}

void Team::start(unsigned count, const Work& work) {
  work_ = work;
  threads_.reserve(count);
  for (unsigned i = 0; i < count; ++i) {
    {
      const std::lock_guard lock(mutex_);
      ++running_;
    }
    std::error_code problem;
    try {
      threads_.push_back(starter_([this] { run(); }));
      continue;
    } catch (const std::system_error& error) {
      problem = error.code();
    } catch (const std::bad_alloc&) {
      problem = std::make_error_code(std::errc::not_enough_memory);
    }
    const std::lock_guard lock(mutex_);
    --running_;
    if (i != 0) return;  // fewer threads do the same work
    Where where;
    where.system_error = problem.value();
    throw Error("memory.host", "the system starts no thread", where);
  }
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

void run_team(unsigned count, std::atomic<bool>& stop, Observer* observer,
              const std::function<Progress()>& progress, const Team::Work& work) {
  Team team(stop);
  team.start(count, work);
  const bool goes_on = team.wait([&] {
    if (observer == nullptr) return true;
    const Progress now = progress();
    const Inside inside(false);
    try {
      return observer->on_progress(now);
    } catch (...) {
      throw CallerException{std::current_exception()};
    }
  });
  if (!goes_on) throw Error("cancelled", "the work was stopped by its caller");
}

}  // namespace loadstone
