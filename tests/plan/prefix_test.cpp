// Tests checkpoints in which all names have a prefix that the model lacks.
#include <gmock/gmock.h>

#include "loadstone/plan.h"
#include "plan/rules.h"
#include "support/errors.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Plan plan_of(const std::vector<std::string>& names, const std::vector<std::string>& targets,
             PlanOptions options = {}) {
  std::vector<FakeTensor> tensors;
  for (const std::string& name : names) tensors.push_back({name, {2}});
  std::vector<Target> wanted;
  for (const std::string& name : targets) wanted.push_back(target_of(name, {2}));
  return make_plan(fake_catalog(tensors), skeleton_of(wanted), options);
}

TEST(Prefix, OneOfAllNamesIsTakenAway) {
  for (const std::string prefix : {"module.", "_orig_mod.", "module._orig_mod."}) {
    const Plan plan = plan_of({prefix + "a", prefix + "b"}, {"a", "b"});
    EXPECT_TRUE(plan.ok()) << prefix;
    const auto findings = found(plan, "plan.prefix");
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_THAT(findings[0].message, HasSubstr("'" + prefix + "'"));
  }
  PlanOptions options;
  options.strip_prefixes.emplace();
  EXPECT_FALSE(plan_of({"module.a"}, {"a"}, options).ok());
}

TEST(Prefix, TheModelsOwnIsLeft) {
  EXPECT_TRUE(plan_of({"module.a"}, {"module.a"}).findings.empty());
  // loadstone removes the prefix with which most names match the model.
  EXPECT_TRUE(plan_of({"module._orig_mod.a"}, {"_orig_mod.a"}).ok());
}

TEST(Prefix, TextIsLiteral) {
  PlanOptions options;
  options.strip_prefixes = std::vector<std::string>{"a.$1+("};
  EXPECT_TRUE(plan_of({"a.$1+(x"}, {"x"}, options).ok());
  EXPECT_FALSE(plan_of({"ab$1+(x"}, {"x"}, options).ok());
}

TEST(Prefix, OneOfSomeNamesIsAFindingWithTheRules) {
  const Plan plan = plan_of({"module.a", "b"}, {"a", "b"});
  EXPECT_FALSE(plan.ok());
  const auto findings = found(plan, "plan.prefix");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].severity, Severity::warning);
  EXPECT_THAT(findings[0].sources, ElementsAre("module.a"));
  EXPECT_THAT(findings[0].suggestion, HasSubstr(R"({"module.":""})"));
  PlanOptions options;
  options.rules = rules_from_json(R"({"module.": ""})");
  EXPECT_TRUE(plan_of({"module.a", "b"}, {"a", "b"}, options).ok());
}

TEST(Prefix, RulesOfPrefixesAreLiteral) {
  PlanOptions options;
  options.rules = rules_from_json(R"({"old.": "new.$1.", "a.b.": ""})");
  const Plan plan = plan_of({"old.x", "oldyx", "a.b.c"}, {"new.$1.x", "oldyx", "c"}, options);
  EXPECT_TRUE(plan.ok());
  const auto refused = error_of([] { static_cast<void>(rules_from_json(R"({"old.": 1})")); });
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code(), "plan.rules");
}

TEST(Prefix, RulesAreToldFromRecipes) {
  for (const char* text : {"[]", "  [1]", R"({"a": "b"})", R"( {"a\"": "b"})", "", "nonsense"}) {
    EXPECT_TRUE(is_rules_json(text)) << text;
  }
  for (const char* text : {"{}", R"({"version": 1})", R"({"a": {}})", "{1}"}) {
    EXPECT_FALSE(is_rules_json(text)) << text;
  }
}

TEST(Prefix, PatternsSayHowManyNamesTheyTake) {
  PlanOptions options;
  options.rules = rules_from_json(R"json([
    {"op": "rename", "sources": ["x\\.(.*)"], "targets": ["$1"]},
    {"op": "rename", "sources": ["y\\.(.*)"], "targets": ["$1"]}])json");
  options.missing_patterns = {{"c.*", MissingPolicy::zeros}, {"no", MissingPolicy::zeros}};
  const Plan plan = plan_of({"x.a", "x.b"}, {"a", "b", "c1", "c2"}, options);
  EXPECT_TRUE(plan.ok());
  const auto findings = found(plan, "plan.pattern");
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_THAT(findings[0].message + findings[1].message,
              testing::AllOf(HasSubstr("'x\\.(.*)' 2 names, 'y\\.(.*)' none"),
                             HasSubstr("'c.*' 2 names, 'no' none")));
  options.missing_patterns = {{"(", MissingPolicy::zeros}};
  const auto refused = error_of([&] { static_cast<void>(plan_of({}, {"a"}, options)); });
  ASSERT_TRUE(refused);
  EXPECT_EQ(refused->code(), "plan.options");
  EXPECT_EQ(refused->where().field, "missing");
}

}  // namespace
}  // namespace loadstone::test
