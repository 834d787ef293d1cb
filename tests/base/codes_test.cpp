#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <string>
#include <string_view>

#include "loadstone/error.h"
#include "support/files.h"
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
    if (test::is_not_looked_at(each.expect)) continue;
    EXPECT_NE(find_code(each.expect), nullptr) << each.expect;
  }
}

bool is_code(std::string_view text) {
  constexpr auto areas = std::to_array<std::string_view>(
      {"audit.", "convert.", "dcp.", "format.", "gg.", "im.", "io.", "ix.", "memory.", "offload.",
       "plan.", "pt.", "q.", "skeleton.", "st."});
  return std::ranges::any_of(areas, [&](std::string_view area) {
    return text.starts_with(area) && text.size() > area.size() &&
           text.find_first_not_of("abcdefghijklmnopqrstuvwxyz_0123456789", area.size()) ==
               std::string_view::npos;
  });
}

// Returns the quoted strings in the source files that look like error codes.
std::set<std::string> codes_in_sources() {
  const std::filesystem::path root = std::filesystem::path(LOADSTONE_HOSTILE_DIR) / "../..";
  std::set<std::string> found;
  for (const char* folder : {"src", "cli"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root / folder)) {
      if (entry.path().extension() != ".cpp" || entry.path().filename() == "codes.cpp") continue;
      const std::string text = test::read_file(entry.path().string());
      for (std::size_t begin = text.find('"'); begin != std::string::npos;) {
        const std::size_t end = std::min(text.find('"', begin + 1), text.size());
        const std::string word = text.substr(begin + 1, end - begin - 1);
        if (is_code(word)) found.insert(word);
        begin = end == text.size() ? std::string::npos : end;
      }
    }
  }
  // These names of kernel files look like error codes.
  for (const char* name : {"memory.current", "memory.limit_in_bytes", "memory.max", "memory.stat",
                           "memory.usage_in_bytes"}) {
    found.erase(name);
  }
  return found;
}

TEST(Codes, ThoseOfTheSourcesAreKnown) {
  const std::set<std::string> found = codes_in_sources();
  EXPECT_TRUE(found.contains("st.hole"));  // control
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
  EXPECT_EQ(exit_status("plan.options"), 2);
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
