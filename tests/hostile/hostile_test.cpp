// Tests that loadstone rejects each file of the manifest with the expected code and a message that
// names the culprit, or accepts the file with the expected warning.
#include <gmock/gmock.h>

#include <algorithm>

#include "loadstone/catalog.h"
#include "support/errors.h"
#include "support/files.h"
#include "support/hostile_cases.h"

namespace loadstone::test {

namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class Hostile : public ::testing::TestWithParam<HostileCase> {};

void expect_names(const std::string& message, const HostileCase& test) {
  EXPECT_THAT(message, HasSubstr(test.culprit));
  if (test.field != "-") {
    EXPECT_THAT(message, HasSubstr(test.field));
  }
  // The message names the file, or for a sharded checkpoint the folder or a shard.
  const std::string file = test.path.substr(test.path.rfind('/') + 1);
  EXPECT_THAT(message, HasSubstr(file));
}

TEST_P(Hostile, IsRefusedWithItsCodeOrAccepted) {
  const HostileCase& test = GetParam();
  std::shared_ptr<const Catalog> catalog;
  const auto error = error_of([&] { catalog = open_checkpoint(test.path); });
  if ((test.accept == "no" && !needs_model(test.expect)) || is_never_read(test.expect)) {
    ASSERT_TRUE(error) << "accepted";
    EXPECT_EQ(error->code(), test.expect) << error->what();
    EXPECT_THAT(error->what(), HasSubstr("[" + test.expect + "]"));
    expect_names(error->what(), test);
    return;
  }
  ASSERT_FALSE(error) << error->what();
  const auto& findings = catalog->findings();
  if (test.accept == "yes") {
    EXPECT_TRUE(findings.empty()) << findings.front().message;
  }
  if (test.accept == "warn" && !needs_values(test.expect) && test.expect != "-") {
    const auto found = std::ranges::find(findings, test.expect, &Finding::code);
    ASSERT_NE(found, findings.end()) << "no finding " << test.expect;
    EXPECT_EQ(found->severity, Severity::warning);
    expect_names(found->message, test);
  }
}

INSTANTIATE_TEST_SUITE_P(Manifest, Hostile, ::testing::ValuesIn(hostile_cases()),
                         [](const auto& each) { return each.param.name; });

// Control for the previous test: a message does not contain the culprit of a different file.
TEST(HostileControl, AMessageDoesNotHoldAnotherCulprit) {
  const auto error = error_of(
      [] { (void)open_checkpoint(LOADSTONE_HOSTILE_DIR "/safetensors/st_off_hole.safetensors"); });
  ASSERT_TRUE(error);
  EXPECT_THAT(error->what(), Not(HasSubstr("blk.0.w")));
}

}  // namespace

}  // namespace loadstone::test
