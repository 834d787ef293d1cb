#include "base/python_json.h"

#include <gmock/gmock.h>

#include <cmath>
#include <string>
#include <utility>

#include "base/json_dom.h"

namespace loadstone {
namespace {

double number_of(const std::string& text) {
  simdjson::dom::parser parser;
  return double{parsed_json(parser, text)};
}

TEST(PythonJson, IsJsonOfTheSameLength) {
  for (const std::string text :
       {R"({"a": 1e400, "b": [-Infinity, NaN, 1e-400], "NaN": "Infinity \" NaN"})",
        R"(["\ud83d", "\udc00\ud83d\ude00", "\ud83d\ud83d\ude00", "\\ud83d"])",
        R"([123456789012345678901, -123456789012345678901, 18446744073709551615])"}) {
    const PythonJson json = python_json(text);
    EXPECT_FALSE(json.fault) << text;
    EXPECT_EQ(json.text.size(), text.size());
    simdjson::dom::parser parser;
    EXPECT_EQ(parsed_json(parser, json.text).error(), simdjson::SUCCESS) << json.text;
  }
}

TEST(PythonJson, LeavesWhatSimdjsonReads) {
  for (const std::string text :
       {"{}", " [1, -0, 0.5e-3, 18446744073709551615, -9223372036854775808] ",
        "{\"\\ud83d\\ude00\xc3\xa9\": \"\\u0041\"}", "9007199254740993", "1e308", "null"}) {
    const PythonJson json = python_json(text);
    EXPECT_FALSE(json.fault) << text;
    EXPECT_FALSE(json.has_infinite);
    EXPECT_EQ(json.text, text);
  }
}

TEST(PythonJson, LargeIntegersAreTheNearestDoubles) {
  for (const std::string text : {"1000000000000000019884624838656", "18446744073709551616",
                                 "-9223372036854775809", "99999999999999999999999999"}) {
    const PythonJson json = python_json(text);
    const double found = number_of(json.text);
    EXPECT_LE(std::abs(found - std::stod(text)), std::abs(std::stod(text)) * 0x1p-53) << text;
    EXPECT_FALSE(json.has_infinite);
  }
}

TEST(PythonJson, TellsInfiniteNumbers) {
  for (const std::string text : {"NaN", "Infinity", "-Infinity", "1e400", "-1E+400"}) {
    const PythonJson json = python_json(text);
    EXPECT_TRUE(json.has_infinite) << text;
    EXPECT_EQ(number_of(json.text), 0) << text;
  }
}

TEST(PythonJson, NamesTheOffset) {
  for (const auto& [text, offset] : {std::pair<std::string, std::size_t>{"", 0},
                                     {"{\"a\": nan}", 6},
                                     {"[1, 2", 5},
                                     {"[1 2]", 3},
                                     {"{\"a\": 1e}", 8},
                                     {"[\"abc", 1},
                                     {"[\"\\ud8\"]", 2},
                                     {"{} {}", 3},
                                     {"[-NaN]", 1}}) {
    const PythonJson json = python_json(text);
    ASSERT_TRUE(json.fault) << text;
    EXPECT_EQ(json.fault->offset, offset) << text;
  }
}

}  // namespace
}  // namespace loadstone
