#include "loadstone/execute.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <latch>
#include <thread>

#include "execute/plan_builder.h"
#include "loadstone/error.h"

namespace loadstone {
namespace {

using testing::Bytes;
using testing::expected_value;
using ::testing::HasSubstr;
using testing::pattern;
using testing::PlanBuilder;
using testing::ReadEvent;
using testing::value_of;
using testing::whole;

Error error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error was thrown";
  return Error("none", "none");
}

// Threads of this process, from the system: a thread that outlives its load would show.
std::size_t thread_count() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
}

// A joined thread may still be listed for a moment.
void expect_threads(std::size_t count) {
  for (int tries = 0; tries < 1000 && thread_count() != count; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(thread_count(), count);
}

// Loads into fresh memory and compares every target with the plain copier.
Report load_and_compare(PlanBuilder& builder, const Plan& plan, ExecuteOptions options = {}) {
  options.storage = &builder.storage;
  const HostMemory memory(plan);
  Report report = execute(plan, memory.destinations(), options);
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    if (target.delivery != Delivery::memory) continue;
    EXPECT_EQ(value_of(memory.destinations()[i]), expected_value(builder, target)) << target.name;
    EXPECT_EQ(report.provenance[i].bytes_written, target.byte_count()) << target.name;
  }
  return report;
}

// One of each kind of movement, over two shards.
void add_all_movements(PlanBuilder& builder) {
  builder.add_plain("plain", Dtype::f32, Dtype::f32, {300, 70}, pattern(84000, 1));
  builder.add_plain("tiny", Dtype::f32, Dtype::f32, {3}, pattern(12, 2));
  builder.add_plain("scalar", Dtype::i64, Dtype::i64, {}, pattern(8, 3));
  builder.add_plain("empty", Dtype::f32, Dtype::f32, {0, 5}, {});
  builder.add_plain("cast", Dtype::bf16, Dtype::f32, {123, 45}, pattern(11070, 4));
  const auto qkv = builder.add_tensor("qkv", Dtype::f16, {6, 100}, pattern(1200, 5));
  for (std::uint64_t part = 0; part < 3; ++part) {
    builder.add_target("split" + std::to_string(part), Dtype::f16, {2, 100},
                       {{.source = qkv, .source_offset = part * 200, .dims = {{200, 1, 1}}}});
    builder.add_target("interleaved" + std::to_string(part), Dtype::f16, {200},
                       {{.source = qkv, .source_offset = part, .dims = {{200, 3, 1}}}});
  }
  builder.add_shard();
  const auto matrix = builder.add_tensor("matrix", Dtype::f16, {211, 97}, pattern(40934, 6));
  builder.add_target("transposed", Dtype::f16, {97, 211},
                     {{.source = matrix, .dims = {{97, 1, 211}, {211, 97, 1}}}});
  builder.add_target("transposed_cast", Dtype::f32, {97, 211},
                     {{.source = matrix, .dims = {{97, 1, 211}, {211, 97, 1}}}});
  std::vector<Box> stack;
  for (std::uint64_t expert = 0; expert < 10; ++expert) {
    const auto source = builder.add_tensor("expert" + std::to_string(expert), Dtype::bf16, {8, 64},
                                           pattern(1024, 10 + expert), expert);
    stack.push_back({.source = source, .target_offset = expert * 512, .dims = {{512, 1, 1}}});
  }
  builder.add_target("stacked", Dtype::bf16, {10, 8, 64}, stack);
  std::vector<Box> joined = stack;
  for (std::uint64_t expert = 0; expert < 10; ++expert) {
    joined[expert].target_offset = expert * 64;
    joined[expert].dims = {{8, 64, 640}, {64, 1, 1}};
  }
  builder.add_target("joined", Dtype::bf16, {8, 640}, joined);
  builder.add_target("spread", Dtype::bf16, {5, 4},
                     {{.source = stack[3].source, .dims = {{5, 0, 4}, {4, 1, 1}}}});
}

TEST(ExecuteTest, MovesEverythingToItsPlace) {
  PlanBuilder builder;
  add_all_movements(builder);
  const Plan plan = builder.build();
  const Report report = load_and_compare(builder, plan);
  EXPECT_EQ(report.provenance.size(), plan.targets.size());
  EXPECT_GE(report.seconds, 0);
  EXPECT_EQ(report.bytes_read + 2 * 100, builder.storage.bytes_read());  // and two headers
}

TEST(ExecuteTest, ThreadsAndChunksDoNotChangeTheBytes) {
  for (unsigned threads = 1; threads <= 8; ++threads) {
    for (const std::uint64_t chunk : {1u, 13u, 512u, 5000u, 4u << 20}) {
      SCOPED_TRACE(std::to_string(threads) + " threads, chunks of " + std::to_string(chunk));
      PlanBuilder builder;
      add_all_movements(builder);
      const Plan plan = builder.build();
      load_and_compare(builder, plan, {.threads = threads, .chunk_bytes = chunk});
    }
  }
}

TEST(ExecuteTest, OneThreadReadsInFileOrderAndEachByteOnce) {
  PlanBuilder builder;
  add_all_movements(builder);
  const Plan plan = builder.build();
  load_and_compare(builder, plan, {.threads = 1, .chunk_bytes = 4096});
  std::string path;
  std::uint64_t position = 0;
  std::size_t data_reads = 0;
  for (const ReadEvent& event : builder.storage.reads()) {
    if (event.offset < 100) continue;  // a header
    EXPECT_LE(event.bytes, 4096u);
    if (event.path != path) {
      EXPECT_GT(event.path, path);
      position = 0;
      path = event.path;
    }
    EXPECT_GE(event.offset, position);
    position = event.offset + event.bytes;
    ++data_reads;
  }
  EXPECT_GT(data_reads, 10u);
}

TEST(ExecuteTest, SmallNeighboursAreReadInOneCall) {
  PlanBuilder builder;
  for (int i = 0; i < 50; ++i) {
    builder.add_plain(std::to_string(i), Dtype::f32, Dtype::f32, {25},
                      pattern(100, static_cast<std::uint64_t>(i)));
  }
  const Plan plan = builder.build();
  load_and_compare(builder, plan, {.threads = 1});
  EXPECT_EQ(builder.storage.reads().size(), 2u);  // the header and the data
}

TEST(ExecuteTest, LargeHolesAreNotRead) {
  PlanBuilder builder;
  const auto table = builder.add_tensor("table", Dtype::u8, {4, 1 << 20}, pattern(4 << 20, 1));
  builder.add_target("column", Dtype::u8, {4}, {{.source = table, .dims = {{4, 1 << 20, 1}}}});
  builder.add_target(
      "slice", Dtype::u8, {4, 9000},
      {{.source = table, .source_offset = 17, .dims = {{4, 1 << 20, 9000}, {9000, 1, 1}}}});
  const Plan plan = builder.build();
  const Report report = load_and_compare(builder, plan);
  EXPECT_LT(report.bytes_read, 5 * 9017u);
}

TEST(ExecuteTest, StagingStaysWithinItsPromise) {
  for (const std::uint64_t staging : {8u, 64u, 1000u, 1u << 16, 1u << 18}) {
    for (const unsigned threads : {1u, 3u}) {
      PlanBuilder builder;
      builder.staging_bytes_max = staging;
      const auto matrix = builder.add_tensor("m", Dtype::bf16, {300, 500}, pattern(300000, 1));
      builder.add_target("t", Dtype::f32, {500, 300},
                         {{.source = matrix, .dims = {{500, 1, 300}, {300, 500, 1}}}});
      const Plan plan = builder.build();
      const Report report = load_and_compare(builder, plan, {.threads = threads});
      EXPECT_LE(report.staging_bytes_peak, staging);
      EXPECT_GT(report.staging_bytes_peak, 0u);
    }
  }
}

TEST(ExecuteTest, PlainLoadsNeedNoStaging) {
  PlanBuilder builder;
  builder.add_plain("a", Dtype::bf16, Dtype::bf16, {1000}, pattern(2000, 1));
  const Plan plan = builder.build();
  EXPECT_EQ(load_and_compare(builder, plan).staging_bytes_peak, 0u);
}

TEST(ExecuteTest, TargetsWithoutMemoryAreLeftOut) {
  PlanBuilder builder;
  builder.add_plain("a", Dtype::u8, Dtype::u8, {10}, pattern(10, 1));
  builder.add_shard();
  builder.add_plain("b", Dtype::u8, Dtype::u8, {10}, pattern(10, 2));
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  auto destinations = memory.destinations();
  destinations[0].data = nullptr;
  const Report report = execute(plan, destinations, {.storage = &builder.storage});
  EXPECT_EQ(report.provenance[0].bytes_written, 0u);
  EXPECT_EQ(report.provenance[1].bytes_written, 10u);
  EXPECT_EQ(value_of(destinations[1]), builder.bytes_of(1));
  for (const ReadEvent& event : builder.storage.reads()) {
    EXPECT_EQ(event.path, "model-1.safetensors");
  }
}

TEST(ExecuteTest, ZerosAreWrittenAndTheRestIsLeftToTheCaller) {
  PlanBuilder builder;
  builder.add_target("zeros", Dtype::f32, {1000, 2000}, {}).recipe.origin = Origin::zeros;
  builder.add_target("own", Dtype::f32, {2}, {}).recipe.origin = Origin::constructor;
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  std::memset(memory.destinations()[0].data, 7, 8000000);
  std::memset(memory.destinations()[1].data, 7, 8);
  const Report report = execute(plan, memory.destinations(), {.storage = &builder.storage});
  EXPECT_EQ(value_of(memory.destinations()[0]), Bytes(8000000));
  EXPECT_EQ(value_of(memory.destinations()[1]), Bytes(8, std::byte{7}));
  EXPECT_EQ(report.provenance[0].bytes_written, 8000000u);
  EXPECT_EQ(report.provenance[1].bytes_written, 0u);
}

TEST(ExecuteTest, SubByteElementsAreCopiedAsBytes) {
  PlanBuilder builder;
  const auto source = builder.add_tensor("f4", Dtype::f4, {4, 6}, pattern(12, 1));
  builder.add_target("same", Dtype::f4, {4, 6}, {whole(source, {4, 6})});
  builder.add_target("rows", Dtype::f4, {2, 6},
                     {{.source = source, .source_offset = 12, .dims = {{12, 1, 1}}}});
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  execute(plan, memory.destinations(), {.storage = &builder.storage});
  EXPECT_EQ(value_of(memory.destinations()[0]), builder.bytes_of(source));
  EXPECT_EQ(value_of(memory.destinations()[1]),
            Bytes(builder.bytes_of(source).begin() + 6, builder.bytes_of(source).end()));

  PlanBuilder turned;
  const auto other = turned.add_tensor("f4", Dtype::f4, {4, 6}, pattern(12, 1));
  turned.add_target("turned", Dtype::f4, {6, 4},
                    {{.source = other, .dims = {{6, 1, 4}, {4, 6, 1}}}});
  const Plan bad = turned.build();
  const HostMemory bad_memory(bad);
  const Error error =
      error_of([&] { execute(bad, bad_memory.destinations(), {.storage = &turned.storage}); });
  EXPECT_EQ(error.code(), "plan.box");
}

// ---- refusals before a data byte is read

TEST(ExecuteTest, ErrorsInThePlanStopItBeforeAnyRead) {
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
  // The control: without the finding it reads.
  plan.findings.clear();
  execute(plan, memory.destinations(), {.storage = &builder.storage});
  EXPECT_FALSE(builder.storage.reads().empty());
}

TEST(ExecuteTest, DestinationsMustFit) {
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

TEST(ExecuteTest, BoxesThatLeaveTheirTensorsAreRefused) {
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

TEST(ExecuteTest, AnotherFileThanPlannedIsRefused) {
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

TEST(ExecuteTest, AFileThatChangesUnderTheLoadIsNotHandedOut) {
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

TEST(ExecuteTest, AShardThatShrinksNamesTensorAndOffset) {
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

TEST(ExecuteTest, AFaultAtAnyReadIsNamedAndEndsAllThreads) {
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
      break;  // there was no such read
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

TEST(ExecuteTest, ProgressEndsWithAllBytes) {
  PlanBuilder builder;
  add_all_movements(builder);
  const Plan plan = builder.build();
  CountingObserver observer;
  load_and_compare(builder, plan, {.observer = &observer});
  EXPECT_GE(observer.calls_, 1u);
  EXPECT_EQ(observer.last_.bytes_done, observer.last_.bytes_total);
  EXPECT_GT(observer.last_.bytes_total, 100000u);
}

TEST(ExecuteTest, ACancelledLoadStopsBetweenReads) {
  const std::size_t threads_before = thread_count();
  PlanBuilder builder;
  builder.add_plain("a", Dtype::u8, Dtype::u8, {1 << 20}, pattern(1 << 20, 1));
  const Plan plan = builder.build();
  std::latch asked(1);
  builder.storage.before_read = [&](std::size_t, const ReadEvent& event) {
    if (event.offset < 100) return;
    asked.wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // the answer has to arrive
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
  // Up to 256 reads were there to be done.
  EXPECT_LT(builder.storage.reads().size(), 256u);
  expect_threads(threads_before);
}

TEST(ExecuteTest, AnObserverThatThrowsEndsTheLoad) {
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

// ---- what is written down

TEST(ExecuteTest, ProvenanceNamesTheBytes) {
  PlanBuilder builder;
  const auto a = builder.add_tensor("a", Dtype::u8, {10}, pattern(10, 1));
  const auto b = builder.add_tensor("b", Dtype::u8, {10}, pattern(10, 2));
  builder.add_target("t", Dtype::u8, {12},
                     {{.source = b, .source_offset = 2, .dims = {{4, 1, 1}}},
                      {.source = b, .source_offset = 8, .target_offset = 4, .dims = {{2, 1, 1}}},
                      {.source = a, .target_offset = 6, .dims = {{6, 1, 1}}}});
  PlannedTarget& tie = builder.add_target("tied", Dtype::u8, {12}, {});
  tie.recipe = {.origin = Origin::tie, .tie_of = "t"};
  tie.delivery = Delivery::none;
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  EXPECT_EQ(memory.destinations()[1].data, memory.destinations()[0].data);
  const Report report = execute(plan, memory.destinations(), {.storage = &builder.storage});
  const Provenance& item = report.provenance[0];
  ASSERT_EQ(item.sources.size(), 2u);
  EXPECT_EQ(item.sources[0].tensor, "b");
  EXPECT_EQ(item.sources[0].offset_begin, 112u);
  EXPECT_EQ(item.sources[0].offset_end, 120u);
  EXPECT_EQ(item.sources[1].tensor, "a");
  EXPECT_EQ(item.sources[1].offset_begin, 100u);
  EXPECT_EQ(item.sources[1].offset_end, 106u);
  EXPECT_EQ(report.provenance[1].origin, Origin::tie);
  EXPECT_EQ(report.provenance[1].tie_of, "t");
  const std::string json = to_json(report);
  EXPECT_THAT(json, HasSubstr(R"("offset_begin": 112)"));
  EXPECT_THAT(json, HasSubstr(R"("tie_of": "t")"));
}

}  // namespace
}  // namespace loadstone
