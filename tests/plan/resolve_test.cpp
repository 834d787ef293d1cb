// Tests ties, rules that do not match, and recipes that the caller provides.
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "loadstone/plan.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Target tie(const std::string& name, const std::string& root, Shape shape) {
  Target target = target_of(name, std::move(shape));
  target.tie_of = root;
  return target;
}

// ---- ties

TEST(MakePlan, TiesTakeWhicheverNameIsThere) {
  const auto skeleton = skeleton_of({target_of("embed", {4, 2}), tie("head", "embed", {4, 2})});
  for (const std::string& only : {std::string("embed"), std::string("head")}) {
    const Plan plan = make_plan(fake_catalog({{only, {4, 2}}}), skeleton);
    EXPECT_TRUE(plan.findings.empty()) << only;
    EXPECT_EQ(plan.targets[0].recipe.origin, Origin::checkpoint);
    EXPECT_EQ(plan.targets[1].recipe.origin, Origin::tie);
    EXPECT_EQ(plan.targets[1].recipe.tie_of, "embed");
    EXPECT_EQ(plan.bytes_to_read, 32u);
    EXPECT_EQ(plan.peak_bytes.at("cpu"), 32u);  // shared memory
  }
  const Plan both = make_plan(fake_catalog({{"embed", {4, 2}}, {"head", {4, 2}}}), skeleton);
  EXPECT_TRUE(both.ok());
  EXPECT_TRUE(found(both, "plan.unexpected").empty());
  ASSERT_EQ(found(both, "plan.tie").size(), 1u);
  EXPECT_EQ(both.targets[0].recipe.boxes[0].source, 0u);
  const Plan none = make_plan(fake_catalog({}), skeleton);
  ASSERT_EQ(found(none, "plan.missing").size(), 1u);
  EXPECT_THAT(found(none, "plan.missing")[0].sources, ElementsAre("embed", "head"));
}

TEST(MakePlan, ATieOfATieHasItsRoot) {
  const std::vector<Target> targets = {tie("c", "b", {2}), tie("b", "a", {2}), target_of("a", {2})};
  for (const std::string only : {"a", "b", "c"}) {
    const Plan plan = make_plan(fake_catalog({{only, {2}}}), skeleton_of(targets));
    EXPECT_TRUE(plan.findings.empty()) << only;
    EXPECT_EQ(plan.targets[0].recipe.tie_of, "a");
    EXPECT_EQ(plan.targets[1].recipe.tie_of, "a");
    EXPECT_EQ(plan.targets[2].recipe.origin, Origin::checkpoint);
  }
}

TEST(MakePlan, TwoNamesOfATieAreComparedByTheLoad) {
  const auto skeleton = skeleton_of({target_of("embed", {4, 2}), tie("head", "embed", {4, 2})});
  const auto catalog = fake_catalog({{"embed", {4, 2}}, {"head", {4, 2}}});
  for (const bool is_error : {false, true}) {
    PlanOptions options;
    if (is_error) options.unexpected = UnexpectedPolicy::error;
    const Plan plan = make_plan(catalog, skeleton, options);
    EXPECT_TRUE(plan.ok());
    ASSERT_EQ(plan.tie_checks.size(), 1u);
    EXPECT_EQ(plan.tie_checks[0].name, "head");
    EXPECT_EQ(plan.tie_checks[0].tied_to, "embed");
    EXPECT_EQ(plan.tie_checks[0].taken, 0u);
    EXPECT_EQ(plan.tie_checks[0].other, 1u);
    EXPECT_EQ(plan.tie_checks[0].is_error, is_error);
    EXPECT_EQ(plan.bytes_to_read, 3 * 32u);  // one tensor is loaded, and two are compared
  }
}

TEST(MakePlan, TwoShapesOfATieAreAnError) {
  const auto skeleton = skeleton_of({target_of("embed", {4, 2}), tie("head", "embed", {4, 2})});
  for (const auto& [embed, head] :
       {std::pair<Shape, Shape>{{4, 2}, {3, 2}}, std::pair<Shape, Shape>{{3, 2}, {4, 2}}}) {
    const Plan plan = make_plan(fake_catalog({{"embed", embed}, {"head", head}}), skeleton);
    ASSERT_EQ(found(plan, "plan.shape").size(), 1u);
    EXPECT_FALSE(plan.ok());
    EXPECT_TRUE(plan.tie_checks.empty());
  }
}

TEST(MakePlan, TiesFollowTheirRootsDtypeAndDevice) {
  PlanOptions options;
  options.dtype = Dtype::bf16;
  options.device_map.entries = {{"a", "cuda:1"}, {"b", "cpu"}};
  const Plan plan =
      make_plan(fake_catalog({{"a.w", {4}}}),
                skeleton_of({target_of("a.w", {4}), tie("b.w", "a.w", {4})}), options);
  EXPECT_EQ(plan.targets[1].dtype, Dtype::bf16);
  EXPECT_EQ(plan.targets[1].device, "cuda:1");
  EXPECT_EQ(found(plan, "plan.tie").size(), 1u);
}

// ---- rules that do not fit

TEST(MakePlan, AMissingExpertIsNamed) {
  std::vector<FakeTensor> sources;
  for (const int expert : {0, 1, 2, 4, 5, 6, 7}) {
    sources.push_back({fmt::format("l.0.experts.{}.gate", expert), {3, 2}});
  }
  PlanOptions options;
  options.rules =
      rules_from_json(R"j([{"op": "stack", "sources": ["(l\\.\\d+)\\.experts\\.(\\d+)\\.gate"],
                                       "targets": ["$1.gates"], "dim": 0}])j");
  for (const std::uint64_t wanted : {7u, 8u}) {
    const Plan plan = make_plan(fake_catalog(sources),
                                skeleton_of({target_of("l.0.gates", {wanted, 3, 2})}), options);
    const auto findings = found(plan, "plan.missing");
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].severity, Severity::error);
    EXPECT_EQ(findings[0].target, "l.0.gates");
    EXPECT_THAT(findings[0].sources, ElementsAre("l.0.experts.3.gate"));
    EXPECT_TRUE(found(plan, "plan.unexpected").empty());
  }
}

TEST(MakePlan, ExpertsMissingAtTheEndAreNamedFromTheShape) {
  PlanOptions options;
  options.missing = MissingPolicy::initialise;  // does not apply to an incomplete stack
  options.rules = rules_from_json(
      R"j([{"op": "stack", "sources": ["e(\\d+)"], "targets": ["t"], "dim": -1}])j");
  const Plan plan = make_plan(fake_catalog({{"e0", {3}}, {"e1", {3}}}),
                              skeleton_of({target_of("t", {3, 4})}), options);
  ASSERT_EQ(found(plan, "plan.missing").size(), 1u);
  EXPECT_FALSE(plan.ok());
  EXPECT_THAT(found(plan, "plan.missing")[0].sources, ElementsAre("e2", "e3"));
}

TEST(MakePlan, CountingFromOneIsFine) {
  PlanOptions options;
  options.rules =
      rules_from_json(R"j([{"op": "stack", "sources": ["e(\\d+)"], "targets": ["t"], "dim": 0}])j");
  const Plan plan = make_plan(fake_catalog({{"e1", {3}}, {"e2", {3}}}),
                              skeleton_of({target_of("t", {2, 3})}), options);
  EXPECT_TRUE(plan.ok());
}

TEST(MakePlan, APartOfAFusedTensorThatIsMissingIsNamed) {
  PlanOptions options;
  options.rules = rules_from_json(R"j([
    {"op": "concat", "sources": ["(.*)\\.q", "(.*)\\.k", "(.*)\\.v"], "targets": ["$1.qkv"],
     "dim": 0},
    {"op": "stack_concat", "sources": ["e\\.(\\d+)\\.gate", "e\\.(\\d+)\\.up"], "targets": ["e"],
     "dims": [0, 1]}])j");
  const Plan plan = make_plan(
      fake_catalog(
          {{"a.q", {2}}, {"a.v", {2}}, {"e.0.gate", {2}}, {"e.0.up", {2}}, {"e.1.up", {2}}}),
      skeleton_of({target_of("a.qkv", {6}), target_of("e", {2, 4})}), options);
  const auto findings = found(plan, "plan.missing");
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_THAT(findings[0].sources, ElementsAre("a.k"));
  EXPECT_THAT(findings[1].sources, ElementsAre("e.1.gate"));
}

TEST(MakePlan, PartsOfDifferentShapesAreFound) {
  PlanOptions options;
  options.rules = rules_from_json(
      R"j([{"op": "stack", "sources": ["e(\\d+)"], "targets": ["t"], "dim": 0},
          {"op": "split", "sources": ["s"], "targets": ["x", "y"], "dim": 0},
          {"op": "transpose", "sources": ["z"], "targets": ["z"], "dims": [0, 1]}])j");
  const Plan plan = make_plan(fake_catalog({{"e0", {3}}, {"e1", {4}}, {"s", {5}}, {"z", {5}}}),
                              skeleton_of({target_of("t", {2, 3}), target_of("x", {2}),
                                           target_of("y", {2}), target_of("z", {5})}),
                              options);
  const auto findings = found(plan, "plan.shape");
  ASSERT_EQ(findings.size(), 4u);
  EXPECT_THAT(findings[0].sources, ElementsAre("e0", "e1"));
  EXPECT_THAT(findings[0].message, HasSubstr("rule 0 (stack)"));
  EXPECT_THAT(findings[1].message, HasSubstr("2 equal parts"));
  EXPECT_THAT(findings[3].message, HasSubstr("does not exist"));
}

TEST(MakePlan, TwoSourcesOfOneTargetAreFound) {
  PlanOptions options;
  options.rules =
      rules_from_json(R"j([{"op": "rename", "sources": ["x\\.a"], "targets": ["a"]}])j");
  const Plan plan = make_plan(fake_catalog({{"a", {1}}, {"x.a", {1}}}),
                              skeleton_of({target_of("a", {1})}), options);
  const auto findings = found(plan, "plan.duplicate");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_FALSE(plan.ok());
  EXPECT_THAT(findings[0].sources, ElementsAre("a", "x.a"));
}

// ---- recipes that the caller provides

TEST(MakePlan, RecipesGoBeforeRules) {
  PlanOptions options;
  options.recipes.targets = {
      {"t", {2, 2}, Dtype::f32, {{1, 0, 0, {{2, 1, 1}}}, {0, 0, 2, {{2, 1, 1}}}}}};
  const Plan plan = make_plan(fake_catalog({{"a", {2}}, {"b", {2}}, {"c", {1}}}),
                              skeleton_of({target_of("t", {2, 2}), target_of("c", {1})}), options);
  EXPECT_TRUE(plan.findings.empty());
  EXPECT_EQ(plan.targets[0].recipe.boxes, options.recipes.targets[0].boxes);
  options.recipes.targets[0].boxes[1].target_offset = 1;
  const Plan overlapping =
      make_plan(fake_catalog({{"a", {2}}, {"b", {2}}, {"c", {1}}}),
                skeleton_of({target_of("t", {2, 2}), target_of("c", {1})}), options);
  ASSERT_EQ(found(overlapping, "plan.box").size(), 1u);
  options.recipes.targets[0].boxes[1].source = 9;
  const Plan nowhere =
      make_plan(fake_catalog({{"a", {2}}, {"b", {2}}, {"c", {1}}}),
                skeleton_of({target_of("t", {2, 2}), target_of("c", {1})}), options);
  ASSERT_EQ(found(nowhere, "plan.box").size(), 1u);
}

}  // namespace
}  // namespace loadstone::test
