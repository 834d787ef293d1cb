#include "base/version_text.h"

#include <gmock/gmock.h>

#include <string>

namespace loadstone {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(VersionText, ShowsDigitsAndDates) {
  for (const std::string text :
       {"\"5f3a-1c\"", "W/\"12\"", "\"0x8DA\"", "Thu, 26 Nov 2026 06:53:47 GMT"}) {
    EXPECT_EQ(version_text(text), text);
  }
  EXPECT_EQ(version_text(""), "no version");
}

TEST(VersionText, ShowsTheDigestOfOthers) {
  for (const std::string text : {"\"S3CRET\"", "key=S3CRET", "Thu, 26 Nov 2026 06:53:47 S3CRET",
                                 "Thu, 26 Nov 2026 06:53:47 GMT S3CRET"}) {
    EXPECT_THAT(version_text(text), Not(HasSubstr("S3CRET")));
    EXPECT_EQ(version_text(text), version_text(text));
    EXPECT_NE(version_text(text), version_text(text + "x"));
  }
}

}  // namespace
}  // namespace loadstone
