#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>

#include "loadstone/error.h"
#include "support/hostile_cases.h"

namespace loadstone {

namespace {

TEST(Codes, AreSortedAndSayWhatToDo) {
  EXPECT_TRUE(std::ranges::is_sorted(all_codes(), {}, &CodeInfo::code));
  for (const CodeInfo& info : all_codes()) {
    EXPECT_EQ(find_code(info.code), &info);
    EXPECT_FALSE(info.meaning.empty()) << info.code;
    EXPECT_FALSE(info.advice.empty()) << info.code;
  }
  EXPECT_EQ(find_code("st.no_such_rule"), nullptr);
  EXPECT_EQ(find_code(""), nullptr);
}

TEST(Codes, ThoseOfTheManifestAreKnown) {
  for (const test::HostileCase& each : test::hostile_cases()) {
    if (each.expect == "-" || each.expect == "digest") continue;
    EXPECT_NE(find_code(each.expect), nullptr) << each.expect;
  }
}

// Whatever looks like a code in the sources.
std::set<std::string> codes_in_sources() {
  const std::filesystem::path root = std::filesystem::path(LOADSTONE_HOSTILE_DIR) / "../..";
  const std::regex code(
      R"re("((?:audit|format|gg|io|ix|memory|plan|skeleton|st)\.[a-z][a-z0-9_]*)")re");
  std::set<std::string> found;
  for (const char* folder : {"src", "cli"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root / folder)) {
      if (entry.path().extension() != ".cpp" || entry.path().filename() == "codes.cpp") continue;
      std::ifstream file(entry.path());
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      for (std::sregex_iterator at(text.begin(), text.end(), code), end; at != end; ++at) {
        found.insert((*at)[1]);
      }
    }
  }
  // Files that the system names so.
  for (const char* name : {"memory.current", "memory.limit_in_bytes", "memory.max", "memory.stat",
                           "memory.usage_in_bytes"}) {
    found.erase(name);
  }
  return found;
}

TEST(Codes, ThoseOfTheSourcesAreKnown) {
  const std::set<std::string> found = codes_in_sources();
  EXPECT_TRUE(found.contains("st.hole"));  // the search works
  EXPECT_GT(found.size(), 80u);
  for (const std::string& code : found) EXPECT_NE(find_code(code), nullptr) << code;
}

TEST(Codes, ExitStatusGoesByKind) {
  EXPECT_EQ(exit_status("st.hole"), 3);
  EXPECT_EQ(exit_status("ix.path_escape"), 3);
  EXPECT_EQ(exit_status("gg.overflow"), 3);
  EXPECT_EQ(exit_status("format.unknown"), 3);
  EXPECT_EQ(exit_status("io.not_found"), 4);
  EXPECT_EQ(exit_status("memory.host"), 5);
  EXPECT_EQ(exit_status("plan.over_budget"), 5);
  EXPECT_EQ(exit_status("plan.missing"), 1);
  EXPECT_EQ(exit_status("cancelled"), 130);
}

TEST(Errors, SayEverythingInOneLine) {
  Where where;
  where.path = "/m/x";
  where.tensor = "a\nb";
  where.field = "shape";
  where.found = "1";
  where.expected = "2";
  where.byte_offset = 8;
  where.system_error = 2;
  const Error error("st.shape", "wrong", where);
  EXPECT_STREQ(error.what(),
               "/m/x: 'a\\x0ab': shape: wrong; found 1; expected 2; at byte 8; "
               "No such file or directory [st.shape]");
  EXPECT_STREQ(Error("internal", "oops").what(), "oops [internal]");
}

}  // namespace

}  // namespace loadstone
