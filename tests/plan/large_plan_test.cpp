// Tests a plan as large as that of a large mixture-of-experts model. It must be correct, and
// planning must read no tensor data.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include <chrono>

#include "loadstone/page.h"
#include "loadstone/plan.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/memory_storage.h"
#include "support/plans.h"
#include "support/watched_storage.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;

constexpr std::size_t layers = 1000;

std::string target_name(std::size_t layer) { return fmt::format("layers.{}.experts.down", layer); }

TEST(LargePlan, StacksFortyFiveThousandSources) {
  std::vector<FakeTensor> sources;
  std::vector<Target> targets;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    // The reverse order ensures that a sorted result is not a coincidence.
    for (std::size_t e = 45; e-- > 0;) {
      sources.push_back({fmt::format("layers.{}.experts.{}.down.weight", layer, e), {2, 3}});
    }
    targets.push_back(target_of(target_name(layer), {45, 2, 3}));
  }
  PlanOptions options;
  options.rules = rules_from_json(R"j([
      {"op": "stack", "sources": ["(.*\\.experts)\\.(\\d+)\\.down\\.weight"],
       "targets": ["$1.down"], "dim": 0}])j");
  const Plan plan = make_plan(fake_catalog(sources), skeleton_of(targets), options);
  EXPECT_EQ(plan.findings.size(), found(plan, "plan.pattern").size());
  ASSERT_EQ(plan.targets.size(), layers);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const auto& boxes = plan.targets[layer].recipe.boxes;
    ASSERT_EQ(boxes.size(), 45u);
    for (std::uint32_t e = 0; e < 45; ++e) {
      const auto source = static_cast<std::uint32_t>(layer * 45 + 44 - e);
      ASSERT_EQ(boxes[e], (Box{source, 0, e * 6u, {{6, 1, 1}}}));
    }
  }
  EXPECT_EQ(plan.bytes_to_read, layers * 45 * 24);
}

TEST(LargePlan, ChecksAQuarterOfAMillionBoxes) {
  std::vector<FakeTensor> sources;
  for (int i = 0; i < 45000; ++i) sources.push_back({fmt::format("s{}", i), {4, 2}});
  std::vector<Target> targets;
  PlanOptions options;
  std::uint32_t next = 0;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    std::vector<Box> boxes;
    for (std::uint64_t b = 0; b < 256; ++b) {
      boxes.push_back({next, 0, b * 2, {{4, 2, 512}, {2, 1, 1}}});
      next = (next + 1) % 45000;
    }
    options.recipes.targets.push_back({target_name(layer), {4, 512}, Dtype::f32, std::move(boxes)});
    targets.push_back(target_of(target_name(layer), {4, 512}));
  }
  const auto catalog = fake_catalog(sources);
  EXPECT_TRUE(make_plan(catalog, skeleton_of(targets), options).findings.empty());
  // One box is moved by one column, which makes an overlap and a hole of the same size.
  options.recipes.targets[777].boxes[13].target_offset += 2;
  const auto findings = found(make_plan(catalog, skeleton_of(targets), options), "plan.box");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].target, target_name(777));
}

TEST(LargePlan, FindsTensOfThousandsOfProblems) {
  std::vector<FakeTensor> sources;
  std::vector<Target> targets;
  for (int i = 0; i < 20000; ++i) {
    sources.push_back({fmt::format("layers.{}.w", i), {2}});
    targets.push_back(target_of(fmt::format("model.layers.{}.w", i), {2}));
  }
  const Plan plan = make_plan(fake_catalog(sources), skeleton_of(targets));
  const auto missing = found(plan, "plan.missing");
  EXPECT_EQ(missing.size(), 20000u);
  EXPECT_EQ(found(plan, "plan.unexpected").size(), 20000u);
  EXPECT_EQ(missing[1].suggestion, "did you mean 'layers.1.w'? The rule above maps it");
  EXPECT_EQ(
      missing[0].suggestion,
      "did you mean 'layers.0.w'? A rule that maps it: "
      R"([{"op":"rename","sources":["layers\\.(\\d+)\\.w"],"targets":["model.layers.$1.w"]}])");
}

// The plan is hostile: reading it would take a minute if each check of a tie scanned all targets.
TEST(LargePlan, AHundredThousandChecksOfTiesAreReadAtOnce) {
  constexpr int count = 100000;
  MemoryStorage storage;
  storage.add_file("/m.safetensors", safetensors_bytes({{"z0", "F32", {2}, some_bytes(8)},
                                                        {"z1", "F32", {2}, some_bytes(8)}}));
  const OpenOptions open = {.storage = &storage};
  std::vector<Target> targets;
  for (int i = 0; i < count; ++i) targets.push_back(target_of(fmt::format("layers.{}", i), {2}));
  const std::string first = fmt::format("layers.{}", count - 1);
  const std::string second = fmt::format("layers.{}", count - 2);
  PlanOptions options;
  options.missing = MissingPolicy::zeros;
  Plan plan = make_plan(open_checkpoint("/m.safetensors", open), skeleton_of(targets), options);
  plan.tie_checks.assign(count, {.name = first, .tied_to = second, .taken = 0, .other = 1});
  plan.bytes_to_read = count * 16;
  const std::string text = to_json(plan);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(plan_from_json(text, open).tie_checks.size(), std::size_t{count});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST(Purity, APlanReadsNothing) {
  MemoryStorage memory;
  memory.add_file("/m.safetensors", safetensors_bytes({{"a", "F32", {2}, some_bytes(8)},
                                                       {"b", "I64", {1}, some_bytes(8)}}));
  LoggingStorage storage(memory);
  OpenOptions open;
  open.storage = &storage;
  const auto catalog = open_checkpoint("/m.safetensors", open);
  EXPECT_FALSE(storage.accesses().empty());  // control: the log contains the header's reads
  for (const Access& access : storage.accesses()) {
    EXPECT_LE(access.offset + access.bytes, catalog->shards()[0].data_begin);
  }
  storage.watch().before_read = [](const Access&) { throw Error("internal", "a plan read"); };
  storage.watch().clear();
  PlanOptions options;
  options.mmap = true;
  options.device_map.mode = DeviceMapMode::automatic;
  const Plan plan = make_plan(catalog, Skeleton::from_catalog(*catalog), options);
  (void)to_json(plan);
  (void)to_table(plan);
  (void)to_html(plan);
  EXPECT_TRUE(storage.accesses().empty());
  // The plan is deterministic.
  EXPECT_EQ(to_json(plan), to_json(make_plan(catalog, Skeleton::from_catalog(*catalog), options)));
}

}  // namespace
}  // namespace loadstone::test
