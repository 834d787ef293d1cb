#include "base/finding_json.h"

#include <gmock/gmock.h>

namespace loadstone::test {
namespace {

Finding finding(const char* code, const char* message) {
  return {.severity = Severity::warning, .code = code, .message = message};
}

TEST(FindingLines, FindingsThatDifferOnlyInNamesShareALine) {
  EXPECT_EQ(finding_lines({finding("q.nan", "'a' has no scales in the run's file 'x'"),
                           finding("q.nan", "'b' has no scales in the run's file 'y'"),
                           finding("q.nan", "'c' has 2 scales"),
                           finding("io.read", "'d' has no scales in the run's file 'z'"),
                           finding("q.nan", "'e' has no scales in the run's file 'it's'")}),
            "  warning: 'a' has no scales in the run's file 'x' [q.nan] and 2 more like it\n"
            "  warning: 'c' has 2 scales [q.nan]\n"
            "  warning: 'd' has no scales in the run's file 'z' [io.read]\n");
  EXPECT_EQ(finding_lines({}), "");
}

}  // namespace
}  // namespace loadstone::test
