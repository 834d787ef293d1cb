#include "base/finding_json.h"

#include <gmock/gmock.h>

namespace loadstone::test {
namespace {

using testing::EndsWith;

TEST(FindingLines, ListsOnlyTheFirstFindingsOfACode) {
  std::vector<Finding> findings(
      22, {.severity = Severity::warning, .code = "q.nan", .message = "'a' has NaN"});
  findings.push_back({.severity = Severity::error, .code = "io.read", .message = "unreadable"});
  const std::string text = finding_lines(findings);
  EXPECT_EQ(std::ranges::count(text, '\n'), 22);
  EXPECT_THAT(text, EndsWith("  warning: 'a' has NaN [q.nan]\n"
                             "  error: unreadable [io.read]\n"
                             "  warning: 2 more [q.nan]\n"));
  EXPECT_EQ(finding_lines({}), "");
}

}  // namespace
}  // namespace loadstone::test
