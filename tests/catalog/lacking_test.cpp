// Tests the message that lists the missing tensors of a numbered series.
#include "catalog/lacking.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string name_of(int layer, int expert, std::string_view role) {
  return fmt::format("model.layers.{}.mlp.experts.{}.{}_proj.weight", layer, expert, role);
}

SeriesGaps lost(const std::vector<std::string>& names) {
  return {.absent = names, .absent_count = names.size()};
}

TEST(LackingSeries, NamesLayerExpertAndTensor) {
  LackingSeries lacking;
  lacking.add("model.layers.1.mlp.experts.gate_up_proj", lost({name_of(1, 2, "up")}));
  const auto findings = lacking.findings();
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].message,
            "layer 1 lacks expert 2: expected 'model.layers.1.mlp.experts.2.up_proj.weight'; check "
            "that all shards are present");
  EXPECT_EQ(findings[0].code, "plan.missing");
  EXPECT_EQ(findings[0].severity, Severity::error);
  EXPECT_THAT(findings[0].sources, ElementsAre(name_of(1, 2, "up")));
}

TEST(LackingSeries, CountsALayerOnceAndATensorOnce) {
  LackingSeries lacking;
  lacking.add("a.gate_up_proj", lost({name_of(1, 2, "gate"), name_of(1, 2, "up")}));
  lacking.add("a.down_proj", lost({name_of(1, 2, "down"), name_of(1, 2, "up")}));
  lacking.add("b.down_proj", lost({name_of(0, 3, "down")}));
  const auto findings = lacking.findings();
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_EQ(findings[0].target, "a.gate_up_proj");
  EXPECT_THAT(findings[0].sources,
              ElementsAre(name_of(1, 2, "gate"), name_of(1, 2, "up"), name_of(1, 2, "down")));
  EXPECT_THAT(findings[0].message, HasSubstr("lacks expert 2: "));
  EXPECT_THAT(findings[1].message, HasSubstr("layer 0 lacks expert 3: "));
}

TEST(LackingSeries, ListsSeveralExpertsAndCountsTheRest) {
  LackingSeries lacking;
  std::vector<std::string> names;
  for (const int expert : {1, 3, 4}) names.push_back(name_of(0, expert, "up"));
  lacking.add("a", lost(names));
  EXPECT_THAT(lacking.findings()[0].message, HasSubstr("lacks experts 1, 3 and 4: expected "));
  for (int expert = 5; expert < 90; ++expert) names.push_back(name_of(0, expert, "up"));
  lacking.add("a", lost(names));
  const Finding finding = lacking.findings()[0];
  EXPECT_THAT(finding.message, HasSubstr("lacks experts 1, 3, 4, 5, 6, 7, 8, 9 ...: expected "));
  EXPECT_THAT(finding.message, HasSubstr(" and 84 more"));
  EXPECT_EQ(finding.sources.size(), 64u);
}

TEST(LackingSeries, CountsTensorsOfOtherSeries) {
  LackingSeries lacking;
  lacking.add("stack", lost({"part.1", "part.2"}));
  lacking.add("other", {.stray = {"piece.01"}});
  const auto findings = lacking.findings();
  EXPECT_EQ(findings[0].message,
            "'stack' lacks 2 tensors: expected 'part.1', 'part.2'; check that all shards are "
            "present");
  EXPECT_EQ(findings[1].code, "plan.series");
  EXPECT_THAT(findings[1].message, HasSubstr("'other' has 'piece.01', whose numbers are outside"));
}

}  // namespace
}  // namespace loadstone::test
