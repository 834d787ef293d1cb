// Tests plans for slices of targets. Each of several processes loads one slice.
#include <gmock/gmock.h>

#include <cstring>

#include "loadstone/error.h"
#include "loadstone/plan.h"
#include "loadstone/recipe_builder.h"
#include "support/errors.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using namespace ::testing;

Target part_of(const std::string& name, Shape shape, Slice slice, Dtype dtype = Dtype::f32) {
  Target target = target_of(name, std::move(shape), dtype);
  target.slice = std::move(slice);
  return target;
}

// The slice of the second of four processes: rows 2 and 3 of 8.
const Slice rows = {{2, 0}, {2, 6}};

TEST(Slices, ReadTheirShareOfASource) {
  const Plan plan =
      make_plan(fake_catalog({{"w", {8, 6}}}), skeleton_of({part_of("w", {8, 6}, rows)}));
  ASSERT_TRUE(plan.ok());
  const PlannedTarget& target = planned(plan, "w");
  EXPECT_EQ(target.shape, Shape({2, 6}));
  EXPECT_THAT(target.recipe.boxes, ElementsAre(Box{0, 12, 0, {{12, 1, 1}}}));
  EXPECT_EQ(plan.bytes_to_read, 2u * 6 * 4);
  const auto said = found(plan, "plan.slice");
  ASSERT_THAT(said, SizeIs(1));
  EXPECT_EQ(said[0].severity, Severity::info);
  EXPECT_THAT(said[0].message, HasSubstr("its part of 1 distributed tensor: "));
}

TEST(Slices, ArePushedThroughStacksAndTranspositions) {
  PlanOptions options;
  options.rules = rules_from_json(
      R"j([{"op": "stack", "sources": ["e\\.(\\d+)"], "targets": ["w"], "dim": 0,
            "then": [{"op": "transpose", "dims": [-2, -1]}]}])j");
  // The stack [4 experts, 3, 5] consists of four transposed [5, 3] tensors. The slice takes experts
  // 1 and 2, and columns 1 to 3.
  const Slice slice = {{1, 0, 1}, {2, 3, 3}};
  const Plan plan =
      make_plan(fake_catalog({{"e.0", {5, 3}}, {"e.1", {5, 3}}, {"e.2", {5, 3}}, {"e.3", {5, 3}}}),
                skeleton_of({part_of("w", {4, 3, 5}, slice)}), options);
  ASSERT_TRUE(plan.ok());
  std::vector<Elements> experts;
  for (std::uint32_t i = 0; i < 4; ++i) {
    experts.push_back(Elements::of_source(i, {5, 3}).permuted({1, 0}));
  }
  const Elements expected = Elements::stack(experts, 0).sliced(0, 1, 2).sliced(2, 1, 3);
  const PlannedTarget& target = planned(plan, "w");
  EXPECT_EQ(written(target.recipe.boxes, target.shape).ids, expected.ids);
  // The recipe has no boxes for experts outside the slice.
  EXPECT_THAT(target.recipe.boxes,
              testing::Each(testing::Field(&Box::source, testing::AnyOf(1, 2))));
}

TEST(Slices, OfRecipesAndConstantsAreCutAsWell) {
  const auto catalog = fake_catalog({{"w", {4, 6}}});
  RecipeBuilder builder(catalog);
  builder.add("w", builder.source("w"));
  std::vector<float> values(12);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  std::vector<std::byte> bytes(values.size() * 4);
  std::memcpy(bytes.data(), values.data(), bytes.size());
  builder.add("c", builder.constant(bytes, {3, 4}, Dtype::f32));
  PlanOptions options;
  options.recipes = builder.finish();
  const Plan plan = make_plan(
      catalog,
      skeleton_of({part_of("w", {4, 6}, {{0, 2}, {4, 2}}), part_of("c", {3, 4}, {{1, 1}, {2, 2}})}),
      options);
  ASSERT_TRUE(plan.ok());
  EXPECT_THAT(planned(plan, "w").recipe.boxes, ElementsAre(Box{0, 2, 0, {{4, 6, 2}, {2, 1, 1}}}));
  const Constant& constant = planned(plan, "c").recipe.constant;
  ASSERT_EQ(constant->size(), 16u);
  std::vector<float> found(4);
  std::memcpy(found.data(), constant->data(), 16);
  EXPECT_THAT(found, ElementsAre(5, 6, 9, 10));
}

TEST(Slices, WithoutElementsKeepTheirSource) {
  const Plan plan = make_plan(fake_catalog({{"w", {3, 6}}}),
                              skeleton_of({part_of("w", {3, 6}, {{3, 0}, {0, 6}})}));
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(planned(plan, "w").recipe.origin, Origin::checkpoint);
  EXPECT_EQ(planned(plan, "w").shape, Shape({0, 6}));
  EXPECT_EQ(plan.bytes_to_read, 0u);
}

TEST(Slices, TiesHaveThoseOfTheirRoots) {
  Target tie = part_of("head", {8, 6}, rows);
  tie.tie_of = "w";
  const auto catalog = fake_catalog({{"w", {8, 6}}});
  const Plan plan = make_plan(catalog, skeleton_of({part_of("w", {8, 6}, rows), tie}));
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(planned(plan, "head").shape, Shape({2, 6}));
  tie.slice.reset();
  EXPECT_EQ(code_of([&] {
              static_cast<void>(make_plan(catalog, skeleton_of({part_of("w", {8, 6}, rows), tie})));
            }),
            "skeleton.json");
}

TEST(Slices, TheShapeOfTheWholeIsTheCheckpoints) {
  const Plan plan =
      make_plan(fake_catalog({{"w", {2, 6}}}), skeleton_of({part_of("w", {8, 6}, rows)}));
  EXPECT_FALSE(plan.ok());
  ASSERT_THAT(found(plan, "plan.shape"), SizeIs(1));
  EXPECT_EQ(found(plan, "plan.shape")[0].expected, "[8, 6]");
}

TEST(Slices, AreNotQuantizedOnTheirWay) {
  PlanOptions options;
  options.quantize = {{"w", {.encoding = "nf4", .dialect = {}, .nested_offset = {}}}};
  const Plan plan = make_plan(fake_catalog({{"w", {8, 6}, Dtype::bf16}}),
                              skeleton_of({part_of("w", {8, 6}, rows, Dtype::bf16)}), options);
  EXPECT_FALSE(plan.ok());
  const auto said = found(plan, "plan.slice");
  ASSERT_THAT(said, SizeIs(2));
  EXPECT_THAT(said[0].message, HasSubstr("[2:4, 0:6] of 'w', [8, 6]"));
}

TEST(Slices, AreNotPlacedOnDisk) {
  PlanOptions options;
  options.device_map.entries = {{"", "disk"}};
  options.offload_folder = "/offload";
  const Plan plan =
      make_plan(fake_catalog({{"w", {8, 6}}}), skeleton_of({part_of("w", {8, 6}, rows)}), options);
  EXPECT_FALSE(plan.ok());
  EXPECT_THAT(found(plan, "plan.slice")[0].message,
              HasSubstr("an offload folder can contain only whole"));
}

TEST(Slices, StandInSkeletonFiles) {
  const Skeleton skeleton = skeleton_of({part_of("w", {8, 6}, rows), target_of("v", {2})});
  const Skeleton read = Skeleton::from_json(skeleton.to_json());
  EXPECT_EQ(read.targets[0].slice, rows);
  EXPECT_EQ(read.targets[1].slice, std::nullopt);
  EXPECT_EQ(read.to_json(), skeleton.to_json());
}

TEST(Slices, OfGroupsStandInSkeletonFilesToo) {
  const Slice halves = {{1, 0}, {4, 6}, {2, 1}};  // rows 1, 2 and 5, 6 of 8
  const Skeleton skeleton = skeleton_of({part_of("w", {8, 6}, halves)});
  EXPECT_EQ(Skeleton::from_json(skeleton.to_json()).targets[0].slice, halves);
  EXPECT_EQ(halves.text(), "[1:3 of 2 groups, 0:6]");
  const Plan plan = make_plan(fake_catalog({{"w", {8, 6}}}), skeleton);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan.bytes_to_read, 6u * 6 * 4);  // also reads the two rows between the groups
  EXPECT_THAT(planned(plan, "w").recipe.boxes,
              ElementsAre(Box{0, 6, 0, {{2, 24, 12}, {12, 1, 1}}}));
}

TEST(Slices, ThatAreNoneOfTheTensorsAreRefused) {
  for (const Slice& slice :
       {Slice{{7, 0}, {2, 6}}, Slice{{0}, {2}}, Slice{{0, 0}, {8, 7}},
        Slice{{UINT64_MAX, 0}, {2, 6}}, Slice{{0, 0, 0}, {8, 6, 1}}, Slice{{0, 0}, {4, 6}, {3, 1}},
        Slice{{0, 0}, {3, 6}, {2, 1}}, Slice{{3, 0}, {4, 6}, {2, 1}}, Slice{{0, 0}, {4, 6}, {2}},
        Slice{{0, 0}, {4, 6}, {0, 1}}}) {
    EXPECT_EQ(code_of([&] {
                static_cast<void>(make_plan(fake_catalog({{"w", {8, 6}}}),
                                            skeleton_of({part_of("w", {8, 6}, slice)})));
              }),
              "skeleton.json")
        << slice.text();
  }
}

}  // namespace
}  // namespace loadstone::test
