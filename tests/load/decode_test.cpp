// Tests that boxes of decodings give the same bytes for every thread count, chunk size and staging
// size.
#include <gmock/gmock.h>

#include <random>

#include "loadstone/execute.h"
#include "plan/costs.h"
#include "support/plan_builder.h"

namespace loadstone::testing {
namespace {

using ::testing::ElementsAre;

Box decoded_box(const PlanBuilder& builder, std::uint32_t decoding, const Shape& shape) {
  Box box = whole(builder.decodings[decoding].sources[0], shape);
  box.decoding = decoding;
  return box;
}

// Returns a plan with weights in one shard, their scales in another, and a plain tensor between
// them. Targets take the decoded values whole, transposed, cast, and twice.
Plan decoding_plan(PlanBuilder& builder) {
  const auto scales = builder.add_tensor("s", Dtype::u8, {3, 5}, Bytes(15, std::byte{129}));
  builder.add_shard();
  const auto weights = builder.add_tensor("w", Dtype::f8_e4m3, {96, 100}, pattern(9600, 1));
  builder.add_plain("plain", Dtype::f32, Dtype::f32, {700}, pattern(2800, 2));
  const auto blocks = builder.add_tensor("b", Dtype::u8, {2, 30, 16}, pattern(960, 3), 3);
  const auto exponents = builder.add_tensor("e", Dtype::u8, {2, 30}, pattern(60, 4));
  builder.decodings = {{"fp8_block", {weights, scales}, {96, 100}, Dtype::bf16},
                       {"fp8_block", {weights, scales}, {96, 100}, Dtype::f32},
                       {"mxfp4", {blocks, exponents}, {2, 960}, Dtype::bf16}};
  builder.add_target("whole", Dtype::bf16, {96, 100}, {decoded_box(builder, 0, {96, 100})});
  builder.add_target("wide", Dtype::f32, {96, 100}, {decoded_box(builder, 0, {96, 100})});
  builder.add_target("exact", Dtype::f32, {96, 100}, {decoded_box(builder, 1, {96, 100})});
  builder.add_target("turned", Dtype::bf16, {960, 2},
                     {{.source = blocks, .dims = {{960, 1, 2}, {2, 960, 1}}, .decoding = 2}});
  // One target is the right half of the columns, and one has a plain and a decoded source.
  builder.add_target("columns", Dtype::bf16, {96, 50},
                     {{.source = weights,
                       .source_offset = 50,
                       .dims = {{96, 100, 50}, {50, 1, 1}},
                       .decoding = 0}});
  const auto plain = builder.add_tensor("raw", Dtype::bf16, {11}, pattern(22, 5));
  builder.add_target("mixed", Dtype::bf16, {21},
                     {{.source = plain, .dims = {{11, 1, 1}}},
                      {.source = weights,
                       .source_offset = 9590,
                       .target_offset = 11,
                       .dims = {{10, 1, 1}},
                       .decoding = 0}});
  return builder.build();
}

// Staging must be large enough for one block and its decoded values.
TEST(DecodeTest, StagingBelowABlockIsMadeAsLargeAsOne) {
  const auto loaded = [](std::uint64_t staging) {
    PlanBuilder builder;
    builder.staging_bytes_max = staging;
    const auto blocks =
        builder.add_tensor("q", BlockFormat::q6_k, {3, 512}, pattern(3 * 512 / 256 * 210, 1));
    builder.decodings = {{"gguf", {blocks}, {3, 512}, Dtype::f32}};
    builder.add_target("t", Dtype::f32, {3, 512}, {decoded_box(builder, 0, {3, 512})});
    const Plan plan = builder.build();
    const HostMemory memory(plan);
    execute(plan, memory.destinations(), {.storage = &builder.storage});
    return value_of(memory.destinations()[0]);
  };
  const Bytes expected = loaded(1 << 20);
  for (const std::uint64_t staging : {1u, 30u, 300u}) EXPECT_TRUE(loaded(staging) == expected);
}

TEST(DecodeTest, TheSameBytesHoweverTheWorkIsCut) {
  for (const std::uint64_t staging : {1u, 16u, 100u, 5000u, 1u << 20}) {
    for (const unsigned threads : {1u, 4u}) {
      for (const std::uint64_t chunk : {1u, 37u, 4096u, 1u << 20}) {
        PlanBuilder builder;
        builder.staging_bytes_max = staging;
        Plan plan = decoding_plan(builder);
        count_costs(plan);
        const HostMemory memory(plan);
        const Report report =
            execute(plan, memory.destinations(),
                    {.threads = threads, .chunk_bytes = chunk, .storage = &builder.storage});
        EXPECT_LE(report.staging_bytes_peak,
                  std::max<std::uint64_t>(staging, 2 * element_bytes_max));
        for (std::size_t i = 0; i < plan.targets.size(); ++i) {
          ASSERT_TRUE(value_of(memory.destinations()[i]) ==
                      expected_value(builder, plan.targets[i]))
              << plan.targets[i].name << " staging " << staging << " chunk " << chunk;
          EXPECT_EQ(report.provenance[i].bytes_written, plan.targets[i].byte_count());
        }
      }
    }
  }
}

TEST(DecodeTest, PeakAndBytesAreAsPlanned) {
  PlanBuilder builder;
  Plan plan = decoding_plan(builder);
  count_costs(plan);
  EXPECT_EQ(plan.bytes_to_read, 9600u + 15 + 2800 + 960 + 60 + 22);
  const HostMemory memory(plan);
  const Report report =
      execute(plan, memory.destinations(), {.threads = 1, .storage = &builder.storage});
  std::uint64_t values = 0;
  for (const PlannedTarget& target : plan.targets) values += target.byte_count();
  EXPECT_LE(values + report.staging_bytes_peak, plan.peak_bytes.at("cpu"));
}

TEST(DecodeTest, ProvenanceNamesWeightsAndScales) {
  PlanBuilder builder;
  const Plan plan = decoding_plan(builder);
  const HostMemory memory(plan);
  const Report report = execute(plan, memory.destinations(), {.storage = &builder.storage});
  const Provenance& mixed = report.provenance.back();
  std::vector<std::string> names;
  for (const SourceRange& range : mixed.sources) names.push_back(range.tensor);
  EXPECT_THAT(names, ElementsAre("raw", "w", "s"));
  EXPECT_EQ(mixed.sources[1].shard, "model-1.safetensors");
  EXPECT_EQ(mixed.sources[1].offset_end - mixed.sources[1].offset_begin, 10u);
  EXPECT_EQ(mixed.sources[2].shard, "model-0.safetensors");
  EXPECT_EQ(mixed.sources[2].offset_end - mixed.sources[2].offset_begin, 1u);
}

TEST(DecodeTest, AFailedReadOfScalesNamesThem) {
  PlanBuilder builder;
  const Plan plan = decoding_plan(builder);
  builder.storage.before_read = [](std::size_t, const testing::ReadEvent& event) {
    if (event.path == "model-0.safetensors" && event.offset >= 100) {
      throw Error("io.read", "cannot read", {.path = event.path});
    }
  };
  const HostMemory memory(plan);
  const Error error =
      error_of([&] { execute(plan, memory.destinations(), {.storage = &builder.storage}); });
  EXPECT_EQ(error.code(), "io.read");
  EXPECT_EQ(error.where().tensor, "s");
  EXPECT_EQ(error.where().path, "model-0.safetensors");
}

TEST(DecodeTest, DecodingsThatDoNotFitAreRefusedBeforeMemoryIsWritten) {
  const auto code = [](auto change) {
    PlanBuilder builder;
    Plan plan = decoding_plan(builder);
    change(plan);
    const HostMemory memory(plan);
    return error_of([&] { execute(plan, memory.destinations(), {.storage = &builder.storage}); })
        .code();
  };
  EXPECT_EQ(code([](Plan& plan) { plan.decodings[0].kernel = "fp9"; }), "plan.box");
  EXPECT_EQ(code([](Plan& plan) { plan.decodings[0].shape = {96, 101}; }), "plan.box");
  EXPECT_EQ(code([](Plan& plan) { plan.decodings[0].sources.pop_back(); }), "plan.box");
  EXPECT_EQ(code([](Plan& plan) { plan.decodings[0].sources[1] = 99; }), "plan.box");
  EXPECT_EQ(code([](Plan& plan) { plan.targets[1].recipe.boxes[0].decoding = 7; }), "plan.box");
  EXPECT_EQ(code([](Plan& plan) { plan.targets[1].recipe.boxes[0].source = 0; }), "plan.box");
  EXPECT_EQ(code([](Plan& plan) { plan.targets[1].recipe.boxes[0].source_offset = 1; }),
            "plan.box");
}

}  // namespace
}  // namespace loadstone::testing
