// Tests loads that are rejected, fail or are cancelled. They must report the right error and stop
// all activity.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <iterator>
#include <latch>
#include <stdexcept>
#include <thread>

#include "loadstone/audit.h"
#include "loadstone/device.h"
#include "loadstone/error.h"
#include "loadstone/execute.h"
#include "loadstone/page.h"
#include "support/plan_builder.h"

namespace loadstone::testing {
namespace {

using ::testing::HasSubstr;

// Returns the number of threads of this process, to detect a thread that is still running after a
// load.
std::size_t thread_count() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

// Retries, because the system may list a joined thread for a moment.
void expect_threads(std::size_t count) {
  for (int tries = 0; tries < 1000 && thread_count() != count; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(thread_count(), count);
}

// ---- rejected before a data byte is read

TEST(ExecuteFailureTest, APlanWithoutACatalog) {
  const Plan none;
  const auto code = [](const auto& work) { return error_of([&] { (void)work(); }).code(); };
  EXPECT_EQ(code([&] { return execute(none, {}); }), "usage");
  EXPECT_EQ(code([&] { return FileViews(none); }), "usage");
  EXPECT_EQ(code([&] {
              require_ok(none);
              return 0;
            }),
            "usage");
  EXPECT_EQ(code([&] { return to_json(none); }), "usage");
  EXPECT_EQ(code([&] { return to_html(none); }), "usage");
  // These functions do not need the catalog of a plan without targets.
  EXPECT_TRUE(HostMemory(none).destinations().empty());
  EXPECT_TRUE(audit(none, {}).ok());
  EXPECT_TRUE(machine_findings(none, 0).empty());
  EXPECT_FALSE(to_table(none).empty());
}

TEST(ExecuteFailureTest, ErrorsInThePlanStopItBeforeAnyRead) {
  PlanBuilder builder;
  builder.add_plain("a", Dtype::u8, Dtype::u8, {10}, pattern(10, 1));
  Plan plan = builder.build();
  plan.findings.push_back({.severity = Severity::error,
                           .code = "plan.missing",
                           .target = "b",
                           .message = "nothing for 'b'"});
  const HostMemory memory(plan);
  const Error error =
      error_of([&] { execute(plan, memory.destinations(), {.storage = &builder.storage}); });
  EXPECT_EQ(error.code(), "plan.missing");
  EXPECT_TRUE(builder.storage.reads().empty());
  // Control: without the error in the plan, the load reads the file.
  plan.findings.clear();
  execute(plan, memory.destinations(), {.storage = &builder.storage});
  EXPECT_FALSE(builder.storage.reads().empty());
}

TEST(ExecuteFailureTest, DestinationsMustFit) {
  PlanBuilder builder;
  builder.add_plain("a", Dtype::u8, Dtype::u8, {10}, pattern(10, 1));
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  const auto code_for = [&](std::vector<Destination> destinations) {
    const Error error =
        error_of([&] { execute(plan, destinations, {.storage = &builder.storage}); });
    return error.code();
  };
  auto destinations = memory.destinations();
  destinations[0].byte_count = 9;
  EXPECT_EQ(code_for(destinations), "plan.destination");
  destinations = memory.destinations();
  destinations[0].dtype = Dtype::i8;
  EXPECT_EQ(code_for(destinations), "plan.destination");
  EXPECT_EQ(code_for({}), "plan.destination");
  EXPECT_TRUE(builder.storage.reads().empty());
}

TEST(ExecuteFailureTest, BoxesThatLeaveTheirTensorsAreRefused) {
  const auto code_of = [](Box box) {
    PlanBuilder builder;
    builder.add_tensor("a", Dtype::u8, {10}, pattern(10, 1));
    builder.add_target("t", Dtype::u8, {10}, {box});
    const Plan plan = builder.build();
    const HostMemory memory(plan);
    const Error error =
        error_of([&] { execute(plan, memory.destinations(), {.storage = &builder.storage}); });
    for (const ReadEvent& event : builder.storage.reads()) EXPECT_LT(event.offset, 100u);
    return error.code();
  };
  EXPECT_EQ(code_of({.source_offset = 1, .dims = {{10, 1, 1}}}), "plan.box");
  EXPECT_EQ(code_of({.target_offset = 1, .dims = {{10, 1, 1}}}), "plan.box");
  EXPECT_EQ(code_of({.dims = {{10, 1, 2}}}), "plan.box");
  EXPECT_EQ(code_of({.dims = {{~0ull, ~0ull, 1}}}), "plan.box");
  EXPECT_EQ(code_of({.target_offset = ~0ull}), "plan.box");
}

// ---- files that change

TEST(ExecuteFailureTest, AnotherFileThanPlannedIsRefused) {
  const auto code_when = [](const std::function<void(testing::MemoryStorage::File&)>& change) {
    PlanBuilder builder;
    builder.add_plain("a", Dtype::u8, Dtype::u8, {1000}, pattern(1000, 1));
    const Plan plan = builder.build();
    Bytes bytes(1100);
    const auto& shard = plan.catalog->shards()[0];
    builder.storage.open(shard.path)->read(0, std::span(bytes));
    const std::size_t reads_before = builder.storage.reads().size();
    change(builder.storage.add(shard.path, bytes));
    const HostMemory memory(plan);
    const Error error =
        error_of([&] { execute(plan, memory.destinations(), {.storage = &builder.storage}); });
    EXPECT_THAT(error.what(), HasSubstr(shard.path));
    for (std::size_t i = reads_before; i < builder.storage.reads().size(); ++i) {
      EXPECT_LT(builder.storage.reads()[i].offset, 100u);
    }
    return error.code();
  };
  EXPECT_EQ(code_when([](auto& file) { file.bytes.resize(1101); }), "io.changed");
  EXPECT_EQ(code_when([](auto& file) { file.modified_ns = 2; }), "io.changed");
  EXPECT_EQ(code_when([](auto& file) { file.bytes[50] ^= std::byte{1}; }), "io.changed");
}

TEST(ExecuteFailureTest, AFileThatChangesUnderTheLoadIsNotHandedOut) {
  PlanBuilder builder;
  builder.add_plain("a", Dtype::u8, Dtype::u8, {1000}, pattern(1000, 1));
  const Plan plan = builder.build();
  auto& file = builder.storage.add(plan.catalog->shards()[0].path, [&] {
    Bytes bytes(1100);
    builder.storage.open(plan.catalog->shards()[0].path)->read(0, std::span(bytes));
    return bytes;
  }());
  builder.storage.before_read = [&](std::size_t, const ReadEvent& event) {
    if (event.offset >= 100) file.modified_ns = 2;
  };
  const HostMemory memory(plan);
  const Error error =
      error_of([&] { execute(plan, memory.destinations(), {.storage = &builder.storage}); });
  EXPECT_EQ(error.code(), "io.changed");
}

TEST(ExecuteFailureTest, AShardThatShrinksNamesTensorAndOffset) {
  PlanBuilder builder;
  builder.add_plain("first", Dtype::u8, Dtype::u8, {1000}, pattern(1000, 1));
  builder.add_plain("second", Dtype::u8, Dtype::u8, {1000}, pattern(1000, 2));
  const Plan plan = builder.build();
  const auto& path = plan.catalog->shards()[0].path;
  Bytes bytes(2100);
  builder.storage.open(path)->read(0, std::span(bytes));
  auto& file = builder.storage.add(path, bytes);
  builder.storage.before_read = [&](std::size_t, const ReadEvent& event) {
    if (event.offset >= 100) file.bytes.resize(1500);
  };
  const HostMemory memory(plan);
  const Error error = error_of(
      [&] { execute(plan, memory.destinations(), {.threads = 1, .storage = &builder.storage}); });
  EXPECT_EQ(error.code(), "io.short_read");
  EXPECT_EQ(error.where().path, path);
  EXPECT_EQ(error.where().tensor, "second");
  EXPECT_EQ(error.where().byte_offset, 1500u);
}

TEST(ExecuteFailureTest, AFaultAtAnyReadIsNamedAndEndsAllThreads) {
  const std::size_t threads_before = thread_count();
  std::size_t faults = 0;
  for (std::size_t number = 0;; ++number) {
    PlanBuilder builder;
    add_all_movements(builder);
    const Plan plan = builder.build();
    builder.storage.before_read = [&](std::size_t now, const ReadEvent& event) {
      if (now != number) return;
      Where where;
      where.path = event.path;
      where.system_error = EIO;
      throw Error("io.read", "cannot read", where);
    };
    const HostMemory memory(plan);
    try {
      execute(plan, memory.destinations(),
              {.threads = 3, .chunk_bytes = 8192, .storage = &builder.storage});
      break;  // the load needed fewer reads
    } catch (const Error& error) {
      ++faults;
      EXPECT_EQ(error.code(), "io.read");
      const ReadEvent event = builder.storage.reads()[number];
      EXPECT_EQ(error.where().path, event.path);
      if (event.offset >= 100) {
        EXPECT_FALSE(error.where().tensor.empty());
        EXPECT_EQ(error.where().byte_offset, event.offset);
      }
    }
    expect_threads(threads_before);
  }
  EXPECT_GT(faults, 10u);
}

// ---- observers

class CountingObserver final : public Observer {
 public:
  bool on_progress(const Progress& progress) override {
    EXPECT_EQ(std::this_thread::get_id(), caller_);
    EXPECT_GE(progress.bytes_done, last_.bytes_done);
    last_ = progress;
    ++calls_;
    return go_on == nullptr || go_on(progress);
  }
  std::function<bool(const Progress&)> go_on;
  Progress last_;
  std::size_t calls_ = 0;

 private:
  std::thread::id caller_ = std::this_thread::get_id();
};

TEST(ExecuteFailureTest, ProgressEndsWithAllBytes) {
  PlanBuilder builder;
  add_all_movements(builder);
  const Plan plan = builder.build();
  CountingObserver observer;
  load_and_compare(builder, plan, {.observer = &observer});
  EXPECT_GE(observer.calls_, 1u);
  EXPECT_EQ(observer.last_.bytes_done, observer.last_.bytes_total);
  EXPECT_GT(observer.last_.bytes_total, 100000u);
}

TEST(ExecuteFailureTest, ACancelledLoadStopsBetweenReads) {
  const std::size_t threads_before = thread_count();
  PlanBuilder builder;
  builder.add_plain("a", Dtype::u8, Dtype::u8, {1 << 20}, pattern(1 << 20, 1));
  const Plan plan = builder.build();
  std::latch asked(1);
  builder.storage.before_read = [&](std::size_t, const ReadEvent& event) {
    if (event.offset < 100) return;
    asked.wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // time for the observer to cancel
  };
  CountingObserver observer;
  observer.go_on = [&](const Progress&) {
    asked.count_down();
    return false;
  };
  const HostMemory memory(plan);
  const Error error = error_of([&] {
    execute(
        plan, memory.destinations(),
        {.threads = 2, .chunk_bytes = 4096, .storage = &builder.storage, .observer = &observer});
  });
  EXPECT_EQ(error.code(), "cancelled");
  // A complete load makes 256 reads.
  EXPECT_LT(builder.storage.reads().size(), 256u);
  expect_threads(threads_before);
}

// A device in host memory whose reads are slow.
class SlowDevice final : public Device {
 public:
  std::byte* allocate(std::string_view, std::uint64_t bytes) override {
    return new std::byte[bytes];
  }
  void free(std::byte* memory) noexcept override { delete[] memory; }
  void copy(unsigned, std::string_view, std::byte* to, std::span<const std::byte> from) override {
    std::ranges::copy(from, to);
  }
  void wait(unsigned) override {}
  void read(std::string_view, const std::byte* from, std::span<std::byte> to) override {
    ++reads;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::copy_n(from, to.size(), to.begin());
  }

  std::atomic<int> reads = 0;
};

// A digest of the value would need 16 reads from the device.
TEST(ExecuteFailureTest, ACancelledLoadStopsReadingDevicesForItsReceipt) {
  PlanBuilder builder;
  builder.add_plain("a", Dtype::bf16, Dtype::f32, {4 << 20}, pattern(8 << 20, 1));
  Plan plan = builder.build();
  plan.targets[0].device = "cuda:0";
  const HostMemory memory(plan);
  std::vector<Destination> destinations = memory.destinations();
  destinations[0].kind = MemoryKind::device;
  for (const bool cancels : {false, true}) {
    SlowDevice device;
    CountingObserver observer;
    observer.go_on = [&](const Progress&) { return !cancels || device.reads == 0; };
    const auto run = [&] {
      execute(plan, destinations,
              {.storage = &builder.storage,
               .device = &device,
               .observer = &observer,
               .receipt = DigestKind::xxh3_128});
    };
    if (cancels) {
      EXPECT_EQ(error_of(run).code(), "cancelled");
      EXPECT_LT(device.reads, 16);
    } else {
      run();
      EXPECT_EQ(device.reads, 16);
      EXPECT_EQ(observer.last_.bytes_done, observer.last_.bytes_total);
      EXPECT_GE(observer.last_.bytes_total, 32u << 20);
    }
  }
}

// The model maps the file, so only the receipt reads it.
TEST(ExecuteFailureTest, ACancelledLoadStopsReadingFilesForItsReceipt) {
  PlanBuilder builder;
  builder.add_plain("a", Dtype::u8, Dtype::u8, {16 << 20}, pattern(16 << 20, 1));
  Plan plan = builder.build();
  plan.targets[0].delivery = Delivery::file_view;
  std::atomic<int> reads = 0;
  builder.storage.before_read = [&](std::size_t, const ReadEvent& event) {
    if (event.offset < 100) return;
    ++reads;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  };
  CountingObserver observer;
  observer.go_on = [&](const Progress&) { return reads == 0; };
  const HostMemory memory(plan);
  const Error error = error_of([&] {
    execute(plan, memory.destinations(),
            {.storage = &builder.storage, .observer = &observer, .receipt = DigestKind::xxh3_128});
  });
  EXPECT_EQ(error.code(), "cancelled");
  EXPECT_LT(reads, 16);
}

TEST(ExecuteFailureTest, AnObserverThatThrowsEndsTheLoad) {
  const std::size_t threads_before = thread_count();
  PlanBuilder builder;
  add_all_movements(builder);
  const Plan plan = builder.build();
  CountingObserver observer;
  observer.go_on = [](const Progress&) -> bool { throw std::runtime_error("mine"); };
  const HostMemory memory(plan);
  EXPECT_THROW(
      execute(plan, memory.destinations(), {.storage = &builder.storage, .observer = &observer}),
      std::runtime_error);
  expect_threads(threads_before);
}

}  // namespace
}  // namespace loadstone::testing
