#include "base/unknown_word.h"

#include <gtest/gtest.h>

namespace loadstone::test {
namespace {

const std::vector<std::string> words = {"load", "plan", "st.overlap", "gg.overlap", "fp4", "nf4"};

TEST(UnknownWord, NamesTheNearest) {
  EXPECT_EQ(unknown_word("command", "lod", words), "unknown command 'lod'; did you mean 'load'?");
  EXPECT_EQ(did_you_mean("laod", words), "; did you mean 'load'?");
}

TEST(UnknownWord, NamesAllThatAreEquallyNear) {
  EXPECT_EQ(did_you_mean("overlap", words), "; did you mean 'st.overlap' or 'gg.overlap'?");
  EXPECT_EQ(did_you_mean("fp5", words), "; did you mean 'fp4'?");  // 'fp4' is closer than 'nf4'
}

TEST(UnknownWord, NamesAllIfNoneIsNear) {
  EXPECT_EQ(did_you_mean("xyzzy", words), "");
  EXPECT_EQ(unknown_word("verb", "xyzzy", {"load", "plan", "bench"}),
            "unknown verb 'xyzzy'; expected load, plan or bench");
}

TEST(UnknownWord, IsSafeToPrint) {
  EXPECT_EQ(unknown_word("verb", "\x1b[2J", {"load"}), "unknown verb '\\x1b[2J'; expected load");
}

}  // namespace
}  // namespace loadstone::test
