#include "base/text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace loadstone {
namespace {

TEST(Printable, LeavesTextAlone) {
  EXPECT_EQ(printable("layers.0.weight"), "layers.0.weight");
  EXPECT_EQ(printable("\xc3\xa9 \xf0\x9f\xa7\xb2"), "\xc3\xa9 \xf0\x9f\xa7\xb2");  // UTF-8
  EXPECT_EQ(printable(""), "");
}

TEST(Printable, EscapesWhatSteersATerminal) {
  EXPECT_EQ(printable("a\nb\x1b[2J\x7f"), "a\\x0ab\\x1b[2J\\x7f");
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(printable("\xc2\x9b"
                      "31m"),
            "\\xc2\\x9b31m");                    // C1: another ESC [
  EXPECT_EQ(printable("\xc2\xa0"), "\xc2\xa0");  // the first after C1
  EXPECT_EQ(printable("\xe2\x80\xae"
                      "abc"),
            "\\xe2\\x80\\xae"
            "abc");                                         // right to left
  EXPECT_EQ(printable("\xe2\x81\xa6"), "\\xe2\\x81\\xa6");  // isolate
  EXPECT_EQ(printable("\xe2\x80\xa8"), "\\xe2\\x80\\xa8");  // line separator
}

TEST(Printable, EscapesWhatIsNoUtf8) {
  EXPECT_EQ(printable("a\xff\x9b"), "a\\xff\\x9b");
  EXPECT_EQ(printable("\xc3"), "\\xc3");
}

TEST(Printable, CutsLongNamesBetweenCharacters) {
  std::string name;
  for (int i = 0; i < 1000; ++i) name += "\xc3\xa9";
  for (std::size_t length_max = 10; length_max < 20; ++length_max) {
    const std::string text = printable(name, length_max);
    EXPECT_TRUE(is_utf8(text));
    EXPECT_THAT(text, testing::HasSubstr("...(2000 bytes)..."));
    EXPECT_THAT(text, testing::Not(testing::HasSubstr("\\x")));
  }
}

TEST(HumanBytes, KeepsThreeOrFourDigits) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(1000), "1.0 kB");
  EXPECT_EQ(human_bytes(999'949), "999.9 kB");
  EXPECT_EQ(human_bytes(999'950), "1.0 MB");
  EXPECT_EQ(human_bytes(std::numeric_limits<std::uint64_t>::max()), "18.4 EB");
}

TEST(ParseBytes, KnowsUnits) {
  const auto parsed = [](std::string_view text) {
    std::uint64_t bytes = 7;
    EXPECT_TRUE(parse_bytes(text, bytes)) << text;
    return bytes;
  };
  EXPECT_EQ(parsed("4096"), 4096u);
  EXPECT_EQ(parsed("0"), 0u);
  EXPECT_EQ(parsed("8GiB"), std::uint64_t{8} << 30);
  EXPECT_EQ(parsed("1.5 gb"), 1'500'000'000u);
}

TEST(ParseBytes, RefusesWhatIsNoSize) {
  std::uint64_t bytes = 0;
  for (const char* text :
       {"", "GiB", "-1", "-0.5GB", "nan", "inf", "-inf", "8 potatoes", "20000000TiB", "1e3"}) {
    EXPECT_FALSE(parse_bytes(text, bytes)) << text;
  }
}

TEST(ExactBytes, LosesNothingAndIsReadAgain) {
  EXPECT_EQ(exact_bytes(std::uint64_t{64} << 20), "64MiB");
  EXPECT_EQ(exact_bytes(5'000'000'000), "5GB");
  for (const std::uint64_t bytes : {0ul, 1ul, 4097ul, 1ul << 30, 1'500'000'000ul}) {
    std::uint64_t read = 7;
    EXPECT_TRUE(parse_bytes(exact_bytes(bytes), read));
    EXPECT_EQ(read, bytes);
  }
}

TEST(NameList, ShowsTheFirstAndCountsTheRest) {
  const std::vector<std::string> names = {"a", "b\n", "c"};
  EXPECT_EQ(name_list(names), "'a', 'b\\x0a', 'c'");
  EXPECT_EQ(name_list(names, 10, 2), "'a', 'b\\x0a' and 8 more");
  EXPECT_EQ(name_list({}, 0), "");
  EXPECT_EQ(counted(1, "tensor"), "1 tensor");
  EXPECT_EQ(counted(0, "tensor"), "0 tensors");
}

TEST(Utf8, RefusesOverlongSurrogatesAndCutSequences) {
  for (const char* text : {"\xc0\xaf", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                           "\xe2\x82", "\x80", "\xf8\x88\x80\x80\x80"}) {
    EXPECT_FALSE(is_utf8(text));
  }
  EXPECT_TRUE(is_utf8("\xf4\x8f\xbf\xbf \xed\x9f\xbf \xee\x80\x80"));
}

}  // namespace
}  // namespace loadstone
