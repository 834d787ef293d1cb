// Tests plans as text for terminals.
#include <gmock/gmock.h>

#include "loadstone/plan.h"
#include "plan/fold.h"
#include "plan/nearest.h"
#include "plan/verdict.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

Plan layered() { return plan_of_layers("<script>alert('&')</script>\x1b[31m"); }

TEST(Table, FoldsRepeatedLayers) {
  const auto rows = fold_targets(layered());
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].name, "layer.{0-11}.q.weight");
  EXPECT_EQ(rows[0].count, 12u);
  EXPECT_EQ(rows[0].dtype, "BF16 -> F32");
  EXPECT_EQ(rows[0].bytes, 12u * 64 * 4);
}

TEST(Table, SaysAllThatMatters) {
  const std::string text = to_table(layered());
  EXPECT_THAT(text, HasSubstr("layer.{0-11}.k.weight  x12"));
  EXPECT_THAT(text, HasSubstr("[8, 8]"));
  EXPECT_THAT(text, HasSubstr("25 targets: 24 checkpoint, 1 zeros"));
  EXPECT_THAT(text, HasSubstr("1 warning  plan.missing"));
  EXPECT_THAT(text, HasSubstr("plan.unexpected"));
  EXPECT_THAT(text, HasSubstr("  plan.cast"));
  EXPECT_THAT(text, HasSubstr("3.1 kB to read"));
  EXPECT_THAT(text, HasSubstr("on cpu"));
  EXPECT_THAT(text,
              StartsWith("OK: every target has a known origin\n2 warnings below. The load can"));
  EXPECT_THAT(text, HasSubstr("planned: peak "));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));  // names cannot control a terminal
}

TEST(Table, ColoursOnlyWhereTheyAreAskedFor) {
  const Plan plan = layered();
  EXPECT_EQ(plan_text(plan, {}), to_table(plan));
  EXPECT_THAT(plan_text(plan, {.is_coloured = true}), StartsWith("\x1b[1;33mOK: every target"));
}

TEST(Table, AnAbsentDeviceContradictsNoVerdict) {
  Plan plan = layered();
  plan.findings.push_back({.severity = Severity::warning, .code = "plan.device_absent"});
  EXPECT_THAT(to_table(plan), AllOf(Not(HasSubstr("The load can begin")),
                                    HasSubstr("The load cannot begin on this machine")));
}

TEST(Table, ShowsTheFreeMemoryNextToThePeak) {
  EXPECT_THAT(plan_text(layered(), {}, 1'500'000),
              HasSubstr("; 1.5 MB are free on this machine\n"));
  EXPECT_THAT(to_table(layered()), Not(HasSubstr("free")));
}

TEST(Table, EndsWithTheVerdictWhereItIsLong) {
  std::vector<FakeTensor> sources;
  std::vector<Target> targets;
  for (char letter = 'a'; letter <= 'z'; ++letter) {
    sources.push_back({std::string(8, letter), {2}});
    targets.push_back(target_of(sources.back().name, {2}));
  }
  const std::string line = "OK: every target has a known origin\n";
  const std::string text = to_table(make_plan(fake_catalog(sources), skeleton_of(targets)));
  EXPECT_THAT(text, StartsWith(line));
  EXPECT_TRUE(text.ends_with("\n\n" + line));
  EXPECT_FALSE(to_table(layered()).ends_with(line));
}

TEST(SuggestedRule, HoldsForAllLayersAndTakesNamesLiterally) {
  const auto rules_of = [](std::string_view source, std::string_view target) {
    return rules_from_json("[" + suggested_rule(source, target) + "]");
  };
  const auto made = [&](std::string_view source, std::string_view target, std::string name,
                        std::string wanted) {
    PlanOptions options;
    options.rules = rules_of(source, target);
    const Plan plan = make_plan(fake_catalog({{std::move(name), {2}}}),
                                skeleton_of({target_of(std::move(wanted), {2})}), options);
    return plan.ok();
  };
  EXPECT_TRUE(made("h.3.ln_1.w", "layers.3.norm_1.w", "h.7.ln_1.w", "layers.7.norm_1.w"));
  EXPECT_FALSE(made("h.3.ln_1.w", "layers.3.norm_1.w", "hx7.ln_1.w", "layers.7.norm_1.w"));
  EXPECT_FALSE(made("h.3.w", "layers.4.w", "h.7.w", "layers.7.w"));  // 3 and 4 stay literal
  const std::string odd = "a+b$1(\"x\\y\")[\u00e9]_{2}";
  EXPECT_TRUE(made(odd, "t$" + odd, odd, "t$" + odd));
}

TEST(Table, NumbersThatDoNotCountStay) {
  const Plan plan =
      make_plan(fake_catalog({{"block2.0.w", {1}}, {"block2.7.w", {1}}, {"block2.9.w", {1}}}),
                skeleton_of({target_of("block2.0.w", {1}), target_of("block2.7.w", {1}),
                             target_of("block2.9.w", {1})}));
  EXPECT_EQ(fold_targets(plan)[0].name, "block2.{0,7,9}.w");
}

}  // namespace
}  // namespace loadstone::test
