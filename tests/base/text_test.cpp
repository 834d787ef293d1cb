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
            "\\xc2\\x9b31m");                    // terminals read U+009B as ESC [
  EXPECT_EQ(printable("\xc2\xa0"), "\xc2\xa0");  // the first character after the C1 controls
  EXPECT_EQ(printable("\xe2\x80\xae"
                      "abc"),
            "\\xe2\\x80\\xae"
            "abc");                                         // right-to-left override
  EXPECT_EQ(printable("\xe2\x81\xa6"), "\\xe2\\x81\\xa6");  // isolate
  EXPECT_EQ(printable("\xe2\x80\xa8"), "\\xe2\\x80\\xa8");  // line separator
}

std::string utf8(std::uint32_t code) {
  const auto tail = [&](int shift) { return static_cast<char>(0x80 | ((code >> shift) & 0x3f)); };
  if (code < 0x80) return {static_cast<char>(code)};
  if (code < 0x800) return {static_cast<char>(0xc0 | (code >> 6)), tail(0)};
  if (code < 0x10000) return {static_cast<char>(0xe0 | (code >> 12)), tail(6), tail(0)};
  return {static_cast<char>(0xf0 | (code >> 18)), tail(12), tail(6), tail(0)};
}

TEST(Printable, EscapesWhatNobodySees) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> ranges;
  for (std::uint32_t code = 0; code <= 0x10ffff; ++code) {
    if (code >= 0xd800 && code <= 0xdfff) continue;
    const std::string text = utf8(code);
    const std::string shown = printable(text);
    if (shown == text) continue;
    EXPECT_EQ(shown.size(), 4 * text.size()) << code;
    if (ranges.empty() || ranges.back().second + 1 != code) ranges.emplace_back(code, code);
    ranges.back().second = code;
  }
  using Range = std::pair<std::uint32_t, std::uint32_t>;
  EXPECT_THAT(ranges,
              testing::ElementsAre(
                  Range(0, 0x1f), Range(0x7f, 0x9f), Range(0xad, 0xad), Range(0x34f, 0x34f),
                  Range(0x61c, 0x61c), Range(0x115f, 0x1160), Range(0x17b4, 0x17b5),
                  Range(0x180b, 0x180f), Range(0x200b, 0x200f), Range(0x2028, 0x202e),
                  Range(0x2060, 0x206f), Range(0x3164, 0x3164), Range(0xfe00, 0xfe0f),
                  Range(0xfeff, 0xfeff), Range(0xffa0, 0xffa0), Range(0xfff0, 0xfffb),
                  Range(0x1bca0, 0x1bca3), Range(0x1d173, 0x1d17a), Range(0xe0000, 0xe0fff)));
}

TEST(VisibleJson, IsTheSameDocument) {
  EXPECT_EQ(visible_json("{\"a\\n\": \"\xc3\xa9\x1b[1m\n\"}"), "{\"a\\n\": \"\xc3\xa9\x1b[1m\n\"}");
  EXPECT_EQ(visible_json(utf8(0x9b) + utf8(0x200b) + "x"), "\\u009b\\u200bx");
  EXPECT_EQ(visible_json(utf8(0xe0041)), "\\udb40\\udc41");
  EXPECT_EQ(visible_json("\xe2"), "\xe2");  // an incomplete character at the end
}

TEST(WithoutSecrets, LeavesOutWhatAUrlMayHold) {
  const std::pair<const char*, const char*> rows[] = {
      {"https://h/x?sig=S", "https://h/x"},
      {"https://h/a b?sig=S T", "https://h/a b"},
      {"HTTPS://u:S@h/x#S", "HTTPS://h/x"},
      {"'https://h/a b?sig=S T' is not a size", "'https://h/a b' is not a size"},
      {"--html: https://h/x?sig=S not known", "--html: https://h/x not known"},
      {"[\"https://h/x?S\", 'http://g/y?S']", "[\"https://h/x\", 'http://g/y']"},
      {"socks5h://u:S@proxy:1/", "socks5h://proxy:1/"},
      {"s3://AK:S@bucket/key#1?x=S", "s3://bucket/key#1"},
      {"hf://u:S@org/name@main/x?x=S", "hf://org/name@main/x"},
      {"ftp://u:S@h/x?sig=S#S", "ftp://h/x"},
      {"gs:/u:S@h/x?sig=S", "gs:/h/x"},
      {"http:/u:S@h/x?sig=S", "http:/h/x"},
      {"https:u:S@h/x?sig=S#S", "https:h/x"},
      {"http:///u:S@h/x?sig=S", "http:///h/x"},
      {"'htp:/h/x?sig=S': gone; 'b:/c?d', a:b?c", "'htp:/h/x': gone; 'b:/c?d', a:b?c"},
      {"...https://h/x?sig=S", "...https://h/x"},
      {"of http: what? x:y?z https:", "of http: what? x:y?z https:"},
      {"a?b://c?d", "a?b://c?d"},
      {"what? no URL", "what? no URL"},
      {"://?", "://?"},
      {"", ""},
  };
  for (const auto& [text, expected] : rows) {
    EXPECT_EQ(without_secrets(text), expected) << text;
    EXPECT_EQ(without_secrets(expected), expected) << text;
  }
  const std::string query(5000, 'S');
  for (std::size_t path = 0; path < 300; path += 30) {
    const std::string url = "https://h/" + std::string(path, 'p') + "?" + query;
    EXPECT_THAT(printable(url), testing::Not(testing::HasSubstr("S"))) << path;
    EXPECT_THAT(printable("'" + url + "'"), testing::Not(testing::HasSubstr("S"))) << path;
  }
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
