#include "loadstone/execute.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "loadstone/error.h"
#include "support/plan_builder.h"

namespace loadstone::testing {
namespace {

using ::testing::HasSubstr;

TEST(ExecuteTest, MovesEverythingToItsPlace) {
  PlanBuilder builder;
  add_all_movements(builder);
  const Plan plan = builder.build();
  const Report report = load_and_compare(builder, plan);
  EXPECT_EQ(report.provenance.size(), plan.targets.size());
  EXPECT_GE(report.seconds, 0);
  EXPECT_EQ(report.bytes_read + 2 * 100, builder.storage.bytes_read());  // plus two headers
}

TEST(HostMemoryTest, ATieShowsTheMemoryOfItsTarget) {
  for (const bool is_quantized : {false, true}) {
    Plan plan;
    plan.targets.resize(2);
    for (PlannedTarget& target : plan.targets) {
      target.shape = {64, 64};
      target.dtype = Dtype::bf16;
      target.device = "cpu";
    }
    plan.targets[0].name = "w";
    plan.targets[0].delivery = Delivery::memory;
    if (is_quantized) plan.targets[0].quantization.emplace().encoding = "nf4";
    plan.targets[1].name = "t";
    plan.targets[1].recipe.origin = Origin::tie;
    plan.targets[1].recipe.tie_of = "w";
    const HostMemory memory(plan);
    const Destination& first = memory.destinations()[0];
    const Destination& second = memory.destinations()[1];
    EXPECT_EQ(memory.find("t"), &second);
    EXPECT_EQ(memory.find("absent"), nullptr);
    EXPECT_EQ(first.data, second.data);
    EXPECT_EQ(first.data == nullptr, is_quantized);
    EXPECT_EQ(first.parts.size(), is_quantized ? 2u : 0u);
    ASSERT_EQ(first.parts.size(), second.parts.size());
    for (std::size_t i = 0; i < first.parts.size(); ++i) {
      EXPECT_EQ(first.parts[i].data(), second.parts[i].data());
      EXPECT_EQ(first.parts[i].size(), second.parts[i].size());
    }
  }
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

// Each slot reserves megabytes of address space, but only memory that is touched counts.
TEST(ExecuteTest, SmallCastsCountSmallStaging) {
  PlanBuilder builder;
  builder.add_plain("a", Dtype::bf16, Dtype::f32, {100}, pattern(200, 1));
  const Plan plan = builder.build();
  EXPECT_EQ(load_and_compare(builder, plan, {.threads = 4}).staging_bytes_peak, 200u);
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

TEST(ExecuteTest, ConstantsAreWritten) {
  PlanBuilder builder;
  const Bytes large = pattern(5000000, 3);
  const auto add = [&](const std::string& name, const Bytes& bytes) -> Recipe& {
    Recipe& recipe = builder.add_target(name, Dtype::u8, {bytes.size()}, {}).recipe;
    recipe.origin = Origin::constant;
    recipe.constant = std::make_shared<const Bytes>(bytes);
    return recipe;
  };
  add("small", pattern(3, 1));
  add("large", large);
  add("none", {});
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  const Report report = execute(plan, memory.destinations(), {.storage = &builder.storage});
  EXPECT_EQ(value_of(memory.destinations()[0]), pattern(3, 1));
  EXPECT_TRUE(value_of(memory.destinations()[1]) == large);
  EXPECT_EQ(report.provenance[1].bytes_written, large.size());
  EXPECT_EQ(report.provenance[1].origin, Origin::constant);
  EXPECT_EQ(report.bytes_read, 0u);
  Plan longer = plan;
  longer.targets[0].shape = {4};
  EXPECT_EQ(error_of([&] {
              const HostMemory more(longer);
              execute(longer, more.destinations(), {.storage = &builder.storage});
            }).code(),
            "plan.box");
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

// ---- provenance

// The target has a source, although the source has no bytes.
TEST(ExecuteTest, ATargetWithoutElementsHasASource) {
  PlanBuilder builder;
  builder.add_plain("empty", Dtype::f32, Dtype::f32, {2, 0}, {});
  const Plan plan = builder.build();
  const Report report = load_and_compare(builder, plan);
  ASSERT_EQ(report.provenance[0].sources.size(), 1u);
  const SourceRange& range = report.provenance[0].sources[0];
  EXPECT_EQ(range.tensor, "empty");
  EXPECT_EQ(range.offset_begin, range.offset_end);
}

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

// Otherwise a program would use memory that nothing fills.
TEST(ExecuteTest, ATieHasNoMemoryOfItsOwn) {
  PlanBuilder builder;
  const auto a = builder.add_tensor("a", Dtype::u8, {4}, pattern(4, 1));
  builder.add_target("t", Dtype::u8, {4}, {{.source = a, .dims = {{4, 1, 1}}}});
  PlannedTarget& tie = builder.add_target("tied", Dtype::u8, {4}, {});
  tie.recipe = {.origin = Origin::tie, .tie_of = "t"};
  tie.delivery = Delivery::none;
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  std::vector<Destination> destinations = memory.destinations();
  std::vector<std::byte> own(4);
  destinations[1].data = own.data();
  const Error error =
      error_of([&] { (void)execute(plan, destinations, {.storage = &builder.storage}); });
  EXPECT_EQ(error.code(), "plan.destination");
  EXPECT_EQ(error.where().tensor, "tied");
  destinations[1].data = nullptr;
  EXPECT_EQ(execute(plan, destinations, {.storage = &builder.storage}).provenance.size(), 2u);
}

// Small values share pages, so rounding to pages adds little to the bytes that the plan counts.
TEST(HostMemoryTest, TakesLittleMoreThanItsValues) {
  PlanBuilder builder;
  builder.add_shard();
  for (int i = 0; i < 500; ++i) {
    builder.add_plain("t" + std::to_string(i), Dtype::u8, Dtype::u8, {4097}, Bytes(4097));
  }
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  const auto& destinations = memory.destinations();
  const auto taken = destinations.back().data + 4097 - destinations.front().data;
  EXPECT_LE(taken, 500 * (4097 + 64));
}

}  // namespace
}  // namespace loadstone::testing
