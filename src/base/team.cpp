#include "base/team.h"

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

}  // namespace loadstone
