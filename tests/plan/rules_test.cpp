// Tests rules in JSON: reading, writing, errors, and the elements that they produce.
#include "plan/rules.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "support/errors.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Expects that the rules make the only target "t" from the sources, with these elements.
void expect_made(const std::string& rules, const std::vector<FakeTensor>& sources,
                 const Elements& expected) {
  PlanOptions options;
  options.rules = rules_from_json(rules);
  const Plan plan =
      make_plan(fake_catalog(sources), skeleton_of({target_of("t", expected.shape)}), options);
  ASSERT_TRUE(plan.ok()) << plan.findings.front().message;
  EXPECT_EQ(written(plan.targets[0].recipe.boxes, expected.shape).ids, expected.ids);
}

Elements source(std::uint32_t index, const Shape& shape) {
  return Elements::of_source(index, shape);
}

TEST(Rules, Rename) {
  expect_made(R"j([{"op": "rename", "sources": "old\\.(.*)", "targets": "$1"}])j",
              {{"old.t", {2, 3}}}, source(0, {2, 3}));
}

TEST(Rules, StackOrdersNumbersByValue) {
  std::vector<FakeTensor> sources;
  for (const int expert : {10, 2, 0, 1, 9, 3, 8, 7, 6, 5, 4}) {
    sources.push_back({fmt::format("t.{}.w", expert), {2, 3}});
  }
  std::vector<Elements> parts;
  for (const std::uint32_t index : {2u, 3u, 1u, 5u, 10u, 9u, 8u, 7u, 6u, 4u, 0u}) {
    parts.push_back(source(index, {2, 3}));
  }
  for (const auto& [dim, at] : std::vector<std::pair<int, std::size_t>>{{0, 0}, {1, 1}, {-1, 2}}) {
    expect_made(fmt::format(R"j([{{"op": "stack", "sources": ["(t)\\.(\\d+)\\.w"],
                                 "targets": ["$1"], "dim": {}}}])j",
                            dim),
                sources, Elements::stack(parts, at));
  }
}

TEST(Rules, ConcatOrdersByPattern) {
  expect_made(R"j([{"op": "concat", "sources": ["q", "k", "v"], "targets": ["t"], "dim": 0}])j",
              {{"k", {1, 4}}, {"q", {3, 4}}, {"v", {1, 4}}},
              Elements::concat({source(1, {3, 4}), source(0, {1, 4}), source(2, {1, 4})}, 0));
  expect_made(R"j([{"op": "concat", "sources": ["q", "k"], "targets": ["t"], "dim": -1}])j",
              {{"k", {3, 1}}, {"q", {3, 4}}},
              Elements::concat({source(1, {3, 4}), source(0, {3, 1})}, 1));
}

TEST(Rules, StackConcatFusesGateAndUp) {
  std::vector<FakeTensor> sources;
  std::vector<Elements> gates;
  std::vector<Elements> ups;
  for (std::uint32_t e = 0; e < 12; ++e) {
    sources.push_back({fmt::format("e.{}.gate", e), {3, 4}});
    sources.push_back({fmt::format("e.{}.up", e), {3, 4}});
    gates.push_back(source(2 * e, {3, 4}));
    ups.push_back(source(2 * e + 1, {3, 4}));
  }
  for (const int dim : {0, 1, 2}) {
    expect_made(fmt::format(R"j([{{"op": "stack_concat", "targets": ["t"], "dims": [0, {}],
                                 "sources": ["e\\.(\\d+)\\.gate", "e\\.(\\d+)\\.up"]}}])j",
                            dim),
                sources,
                Elements::concat({Elements::stack(gates, 0), Elements::stack(ups, 0)},
                                 static_cast<std::size_t>(dim)));
  }
}

TEST(Rules, SplitBySizesAndInEqualParts) {
  PlanOptions options;
  options.rules = rules_from_json(R"j([
    {"op": "split", "sources": ["(.*)\\.qkv"], "targets": ["$1.q", "$1.k", "$1.v"], "dim": 0,
     "sizes": [4, 1, 1]},
    {"op": "split", "sources": ["(.*)\\.kv"], "targets": ["$1.k", "$1.v"], "dim": -1}])j");
  const Plan plan = make_plan(
      fake_catalog({{"a.qkv", {6, 5}}, {"b.kv", {3, 4}}}),
      skeleton_of({target_of("a.q", {4, 5}), target_of("a.k", {1, 5}), target_of("a.v", {1, 5}),
                   target_of("b.k", {3, 2}), target_of("b.v", {3, 2})}),
      options);
  ASSERT_TRUE(plan.ok()) << plan.findings.front().message;
  const auto expect = [&](const std::string& name, const Elements& expected) {
    EXPECT_EQ(written(planned(plan, name).recipe.boxes, expected.shape).ids, expected.ids) << name;
  };
  expect("a.q", source(0, {6, 5}).sliced(0, 0, 4));
  expect("a.k", source(0, {6, 5}).sliced(0, 4, 1));
  expect("a.v", source(0, {6, 5}).sliced(0, 5, 1));
  expect("b.k", source(1, {3, 4}).sliced(1, 0, 2));
  expect("b.v", source(1, {3, 4}).sliced(1, 2, 2));
  EXPECT_EQ(plan.bytes_to_read, (6 * 5 + 3 * 4) * 4u);
}

TEST(Rules, TransposePermuteSliceReshape) {
  const std::vector<FakeTensor> sources = {{"s", {4, 3, 2}}};
  const Elements s = source(0, {4, 3, 2});
  expect_made(R"j([{"op": "transpose", "sources": ["s"], "targets": ["t"], "dims": [0, -1]}])j",
              sources, s.permuted({2, 1, 0}));
  expect_made(R"j([{"op": "permute", "sources": ["s"], "targets": ["t"], "dims": [1, 2, 0]}])j",
              sources, s.permuted({1, 2, 0}));
  expect_made(R"j([{"op": "slice", "sources": ["s"], "targets": ["t"], "dim": 1, "start": 1,
                   "sizes": [2]}])j",
              sources, s.sliced(1, 1, 2));
  expect_made(R"j([{"op": "reshape", "sources": ["s"], "targets": ["t"], "sizes": [6, 4]}])j",
              sources, s.reshaped({6, 4}));
}

TEST(Rules, ThenAddsSteps) {
  expect_made(R"j([{"op": "stack", "sources": ["s\\.(\\d)"], "targets": ["t"], "dim": 0,
                   "then": [{"op": "reshape", "sizes": [2, 3, 2, 5]},
                            {"op": "permute", "dims": [2, 0, 1, 3]},
                            {"op": "reshape", "sizes": [12, 5]}]}])j",
              {{"s.0", {6, 5}}, {"s.1", {6, 5}}},
              Elements::stack({source(0, {6, 5}), source(1, {6, 5})}, 0)
                  .reshaped({2, 3, 2, 5})
                  .permuted({2, 0, 1, 3})
                  .reshaped({12, 5}));
}

TEST(Rules, FirstMatchWinsAndOthersKeepTheirNames) {
  PlanOptions options;
  options.rules = rules_from_json(R"j([
    {"op": "rename", "sources": ["a"], "targets": ["b"]},
    {"op": "rename", "sources": ["[ac]"], "targets": ["x"]}])j");
  const Plan plan = make_plan(
      fake_catalog({{"a", {1}}, {"c", {2}}, {"d", {3}}}),
      skeleton_of({target_of("b", {1}), target_of("x", {2}), target_of("d", {3})}), options);
  EXPECT_TRUE(plan.ok());
  EXPECT_EQ(plan.findings.size(), found(plan, "plan.pattern").size());
}

TEST(Rules, PatternsMatchWholeNames) {
  PlanOptions options;
  options.rules = rules_from_json(R"j([{"op": "rename", "sources": ["a"], "targets": ["b"]}])j");
  const Plan plan =
      make_plan(fake_catalog({{"aa", {1}}}), skeleton_of({target_of("aa", {1})}), options);
  EXPECT_EQ(plan.findings.size(), found(plan, "plan.pattern").size());
}

TEST(Rules, DollarSigns) {
  PlanOptions options;
  options.rules =
      rules_from_json(R"j([{"op": "rename", "sources": ["(.)"], "targets": ["$$$1$$"]}])j");
  const Plan plan =
      make_plan(fake_catalog({{"a", {1}}}), skeleton_of({target_of("$a$", {1})}), options);
  EXPECT_EQ(plan.findings.size(), found(plan, "plan.pattern").size());
}

TEST(Rules, JsonRoundTrip) {
  const std::string text = R"j([
    {"op": "stack_concat", "sources": ["a\\.(\\d+)", "b"], "targets": ["x\"$$"], "dims": [0, -1]},
    {"op": "slice", "sources": ["c"], "targets": ["y"], "dim": -2, "start": 3, "sizes": [4],
     "then": [{"op": "reshape", "sizes": []}, {"op": "transpose", "dims": [0, 1]}]},
    {"op": "rename", "sources": ["d"], "targets": ["z"]}])j";
  const Rules rules = rules_from_json(text);
  const std::string written_once = rules_to_json(rules);
  EXPECT_EQ(rules_to_json(rules_from_json(written_once)), written_once);
  ASSERT_EQ(rules.size(), 3u);
  EXPECT_EQ(rules[1].op, RuleOp::slice);
  EXPECT_EQ(rules[1].start, 3u);
  EXPECT_THAT(rules[1].dims, ElementsAre(-2));
  ASSERT_EQ(rules[1].then.size(), 2u);
  EXPECT_EQ(rules[1].then[0].op, RuleOp::reshape);
  EXPECT_THAT(rules[1].then[1].dims, ElementsAre(0, 1));
  EXPECT_THAT(rules[0].sources, ElementsAre("a\\.(\\d+)", "b"));
}

struct BadRules {
  const char* text;
  const char* field;
};

class RefusedRules : public testing::TestWithParam<BadRules> {};

TEST_P(RefusedRules, NameTheRuleAndTheField) {
  const auto error = error_of([] { (void)rules_from_json(GetParam().text); });
  ASSERT_TRUE(error) << GetParam().text;
  EXPECT_EQ(error->code(), "plan.rules");
  EXPECT_EQ(error->where().field, GetParam().field) << error->what();
}

INSTANTIATE_TEST_SUITE_P(
    Each, RefusedRules,
    testing::Values(
        BadRules{R"j([{"op": "rename", "sources": ["a"], "targets": ["b"]},
                     {"op": "rename", "sources": ["("], "targets": ["b"]}])j",
                 "rules[1].sources[0]"},
        BadRules{R"j([{"op": "rename", "sources": ["a(?=b)"], "targets": ["b"]}])j",
                 "rules[0].sources[0]"},
        BadRules{R"j([{"op": "rename", "sources": ["((a{100}){100}){100}"], "targets": ["b"]}])j",
                 "rules[0].sources[0]"},
        BadRules{R"j([{"op": "rename", "sources": ["(a)"], "targets": ["$2"]}])j",
                 "rules[0].targets[0]"},
        BadRules{R"j([{"op": "rename", "sources": ["(a)"], "targets": ["$x"]}])j",
                 "rules[0].targets[0]"},
        BadRules{R"j([{"op": "rename", "sources": ["a"], "targets": ["b$"]}])j",
                 "rules[0].targets[0]"},
        BadRules{R"j([{"op": "rename", "sources": [], "targets": ["b"]}])j", "rules[0].sources"},
        BadRules{R"j([{"op": "rename", "sources": ["a"], "targets": ["b", "c"]}])j",
                 "rules[0].targets"},
        BadRules{R"j([{"op": "rename", "sources": ["a"], "targets": ["b"], "dim": 0}])j",
                 "rules[0].dims"},
        BadRules{R"j([{"op": "stack", "sources": ["a"], "targets": ["b"]}])j", "rules[0].dim"},
        BadRules{R"j([{"op": "stack", "sources": ["a"], "targets": ["b"], "dim": 0.5}])j",
                 "rules[0].dim"},
        BadRules{
            R"j([{"op": "stack", "sources": ["a"], "targets": ["b"], "dim": 0, "dims": [0]}])j",
            "rules[0].dims"},
        BadRules{R"j([{"op": "split", "sources": ["a"], "targets": ["b", "c"], "dim": 0,
                      "sizes": [1]}])j",
                 "rules[0].sizes"},
        BadRules{R"j([{"op": "slice", "sources": ["a"], "targets": ["b"], "dim": 0}])j",
                 "rules[0].sizes"},
        BadRules{
            R"j([{"op": "slice", "sources": ["a"], "targets": ["b"], "dim": 0, "sizes": [-1]}])j",
            "rules[0].sizes[0]"},
        BadRules{R"j([{"op": "transpose", "sources": ["a"], "targets": ["b"], "dims": [0]}])j",
                 "rules[0].dims"},
        BadRules{R"j([{"op": "rename", "sources": ["a"], "targets": ["b"], "start": 1}])j",
                 "rules[0].start"},
        BadRules{R"j([{"op": "rename", "sources": ["a"], "targets": ["b"],
                      "then": [{"op": "stack", "dim": 0}]}])j",
                 "rules[0].then[0].op"},
        BadRules{R"j([{"op": "chunk", "sources": ["a"], "targets": ["b"]}])j", "rules[0].op"},
        BadRules{R"j([{"op": "rename", "source": ["a"], "targets": ["b"]}])j", "rules[0].sources"},
        BadRules{R"j([{"op": "rename", "sources": ["a"], "targets": ["b"], "note": 1}])j",
                 "rules[0].note"},
        BadRules{R"j([{"op": "rename", "op": "stack", "sources": ["a"], "targets": ["b"]}])j",
                 "rules[0].op"},
        BadRules{R"j({"op": "rename"})j", "rules.op"}, BadRules{R"j("a")j", "rules"},
        BadRules{R"j([1])j", "rules[0]"}, BadRules{"[", ""}));

TEST(Rules, RulesMadeInCodeAreCheckedToo) {
  PlanOptions options;
  options.rules = {{RuleOp::stack, {"a"}, {"b"}, {}, {}, 0, {}}};
  const auto catalog = fake_catalog({{"a", {1}}});
  EXPECT_EQ(code_of([&] { (void)make_plan(catalog, skeleton_of({}), options); }), "plan.rules");
}

TEST(FillPattern, LiteralsAndGroups) {
  const auto fill = [](const char* pattern, std::vector<std::string_view> groups) {
    return fill_pattern(re2::RE2(pattern), groups);
  };
  EXPECT_EQ(fill(R"(a\.(\d+)\.b)", {"3"}), "a.3.b");
  EXPECT_EQ(fill(R"(^a.([^)]+).(\(x\))$)", {"3", "(x)"}), "a.3.(x)");
  EXPECT_EQ(fill(R"(a\.\d+)", {}), "");
  EXPECT_EQ(fill(R"(a+)", {}), "");
  EXPECT_EQ(fill(R"((a(b)))", {"ab", "b"}), "");
  EXPECT_EQ(fill(R"((\d+))", {"x"}), "");
}

}  // namespace
}  // namespace loadstone::test
