// Tests that files are opened concurrently, and that failures do not depend on the threads' timing.
#include "catalog/for_each_file.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "storage/forwarding.h"
#include "storage/stop.h"
#include "support/errors.h"

namespace loadstone::test {
namespace {

// Waits until `count` threads have arrived. Thread-safe.
class Meeting {
 public:
  explicit Meeting(unsigned count) : count_(count) {}
  void arrive() {
    std::unique_lock lock(mutex_);
    ++arrived_;
    all_.notify_all();
    all_.wait(lock, [this] { return arrived_ >= count_; });
  }

 private:
  const unsigned count_;
  unsigned arrived_ = 0;
  std::mutex mutex_;
  std::condition_variable all_;
};

[[noreturn]] void fail(std::size_t file) {
  throw Error("io.remote", "it failed", {.path = std::to_string(file)});
}

TEST(ForEachFile, LocalFilesAreOpenedInOrderByThisThread) {
  std::vector<std::size_t> seen;
  for_each_file(local_storage(), 20, 0, [&](std::size_t file) { seen.push_back(file); });
  EXPECT_EQ(seen.size(), 20u);
  EXPECT_TRUE(std::ranges::is_sorted(seen));
}

TEST(ForEachFile, RemoteFilesAreOpenedAtOnce) {
  Meeting meeting(4);  // a single thread would wait for ever
  std::mutex mutex;
  std::multiset<std::size_t> seen;
  for_each_file(local_storage(), 8, 4, [&](std::size_t file) {
    if (file < 4) meeting.arrive();
    const std::lock_guard lock(mutex);
    seen.insert(file);
  });
  EXPECT_EQ(seen, (std::multiset<std::size_t>{0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(ForEachFile, TheLowestFileThatFailsIsReported) {
  for (int round = 0; round < 100; ++round) {
    Meeting meeting(2);
    std::atomic<bool> has_failed = false;
    const auto error = error_of([&] {
      for_each_file(local_storage(), 50, 2, [&](std::size_t file) {
        if (file < 2) meeting.arrive();
        if (file == 0) {  // fails after the second file
          while (!has_failed) std::this_thread::yield();
          fail(file);
        }
        if (file == 1) {
          has_failed = true;
          fail(file);
        }
      });
    });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->where().path, "0");
  }
}

TEST(ForEachFile, LaterFilesAreCancelled) {
  Meeting meeting(2);
  const auto error = error_of([&] {
    for_each_file(local_storage(), 50, 2, [&](std::size_t file) {
      EXPECT_LT(file, 2u);
      meeting.arrive();
      if (file == 0) fail(file);
      while (!StopScope::is_stopped()) std::this_thread::yield();
      throw Error("cancelled", "the second file is not needed");
    });
  });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->where().path, "0");
}

// Cancels the work as soon as a file is being opened.
class CancelledStorage final : public ForwardingStorage {
 public:
  CancelledStorage() : ForwardingStorage(local_storage()) {}
  void require_wanted() override {
    if (is_opening) throw std::runtime_error("the caller cancels");
  }
  std::atomic<bool> is_opening = false;
};

TEST(ForEachFile, ACallerCanCancel) {
  CancelledStorage storage;
  const auto open = [&](std::size_t /*file*/) {
    storage.is_opening = true;
    while (!StopScope::is_stopped()) std::this_thread::yield();
    throw Error("cancelled", "the file is not needed");
  };
  EXPECT_THROW(for_each_file(storage, 50, 4, open), std::runtime_error);
}

TEST(ForEachFile, ScopesAreNested) {
  bool outer_stops = false;
  const IsStopped outer = [&] { return outer_stops; };
  const IsStopped inner = [] { return false; };
  const StopScope outer_scope(outer);
  {
    const StopScope inner_scope(inner);
    EXPECT_FALSE(StopScope::is_stopped());
    outer_stops = true;
    EXPECT_TRUE(StopScope::is_stopped());
  }
  EXPECT_TRUE(StopScope::is_stopped());
}

}  // namespace
}  // namespace loadstone::test
