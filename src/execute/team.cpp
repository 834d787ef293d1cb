#include "execute/team.h"

#include <chrono>
#include <new>
#include <system_error>
#include <utility>

#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr auto watch_interval = std::chrono::milliseconds(50);

}  // namespace

Team::~Team() {
  stop_ = true;
  join();
}

void Team::join() noexcept {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Team::run(const std::function<void()>& work) noexcept {
  std::exception_ptr failure;
  try {
    work();
  } catch (const std::bad_alloc&) {
    failure = std::make_exception_ptr(Error("memory.host", "there is no memory left"));
  } catch (...) {
    failure = std::current_exception();
  }
  if (failure) stop_ = true;
  const std::lock_guard lock(mutex_);
  if (failure && !failure_) failure_ = std::move(failure);
  --running_;
  ended_.notify_all();
}

void Team::start(unsigned count, const std::function<void()>& work) {
  work_ = work;
  threads_.reserve(count);
  for (unsigned i = 0; i < count; ++i) {
    {
      const std::lock_guard lock(mutex_);
      ++running_;
    }
    try {
      threads_.emplace_back([this] { run(work_); });
    } catch (const std::system_error& error) {
      const std::lock_guard lock(mutex_);
      --running_;
      if (i != 0) return;  // fewer threads do the same work
      Where where;
      where.system_error = error.code().value();
      throw Error("memory.host", "the system starts no thread", where);
    }
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

}  // namespace loadstone
