// Tests the check of numbered series, and the findings if a series that the rules declare is
// broken.
#include "catalog/series.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <algorithm>

#include "support/plans.h"

namespace loadstone::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Texts = std::vector<std::vector<std::string>>;  // the numbers of each partner

SeriesCheck checked(const Texts& partners, const SeriesWish& wish = {}) {
  std::vector<SeriesMember> members;
  for (std::uint32_t p = 0; p < partners.size(); ++p) {
    for (const std::string& number : partners[p]) members.push_back({p, number});
  }
  return check_series(members, static_cast<std::uint32_t>(partners.size()), wish);
}

TEST(Series, EqualNumbersWithoutGapsAreWhole) {
  EXPECT_TRUE(checked({{"0", "1", "2"}, {"0", "1", "2"}}).ok());
  EXPECT_TRUE(checked({{"2", "0", "1"}, {"1", "0", "2"}}).ok());  // in any order
  EXPECT_EQ(checked({{"0", "1"}}).end, 2u);
  EXPECT_TRUE(checked({{"0"}}).ok());
  EXPECT_TRUE(check_series({}, 0).ok());
  EXPECT_TRUE(checked({{"7", "8"}}, {.count = 2, .first = 7}).ok());
}

TEST(Series, ALostTensorBesideAStrayOneIsFoundThoughCountsAgree) {
  const auto check = checked({{"0", "1", "2", "3"}, {"0", "2", "3", "4"}});
  EXPECT_THAT(check.absent, ElementsAre(SeriesGap{1, 1}, SeriesGap{0, 4}));
  EXPECT_EQ(check.absent_count, 2u);
}

TEST(Series, GapsAndShortPartnersAreFound) {
  EXPECT_THAT(checked({{"0", "2"}}).absent, ElementsAre(SeriesGap{0, 1}));
  EXPECT_THAT(checked({{"1", "2"}}).absent, ElementsAre(SeriesGap{0, 0}));
  EXPECT_THAT(checked({{"0", "1"}, {"0"}}).absent, ElementsAre(SeriesGap{1, 1}));
  EXPECT_THAT(checked({{"0", "1"}, {}}).absent, ElementsAre(SeriesGap{1, 0}, SeriesGap{1, 1}));
  EXPECT_THAT(checked({{"0", "1"}}, {.count = 3}).absent, ElementsAre(SeriesGap{0, 2}));
}

TEST(Series, NumbersInOtherSpellingsAreStray) {
  EXPECT_THAT(checked({{"0", "1", "01"}}).stray, ElementsAre(2));
  EXPECT_THAT(checked({{"0", "1", "1"}}).stray, ElementsAre(2));
  for (const char* text : {"", "00", "+1", "-1", "1 ", "0x1", "1e0", "99999999999999999999"}) {
    EXPECT_THAT(checked({{"0", text}}).stray, ElementsAre(1)) << text;
  }
}

TEST(Series, ClaimedNumbersAreNeverCountedTo) {
  for (const char* text : {"1000", "4000000000", "999999999999999999"}) {
    const auto check = checked({{"0", "1", "2", text}, {"0", "1", "2", "3"}});
    EXPECT_THAT(check.stray, ElementsAre(3)) << text;
    EXPECT_THAT(check.absent, ElementsAre(SeriesGap{0, 3})) << text;
  }
  // The finding lists only the first missing numbers, and counts all.
  const auto check = checked({{"0"}}, {.count = 1'000'000'000});
  EXPECT_EQ(check.absent.size(), series_listed_max(1));
  EXPECT_EQ(check.absent_count, 999'999'999u);
}

TEST(Series, ManyPartnersOfOneTensorEachCostNoMoreThanTheirNumber) {
  Texts partners(50'000);
  for (std::size_t i = 0; i < partners.size(); ++i) partners[i] = {std::to_string(i)};
  const auto check = checked(partners);
  EXPECT_EQ(check.absent_count, 50'000ull * 49'999);
  EXPECT_EQ(check.absent.size(), series_listed_max(partners.size()));
}

// ---- declared rules

Plan planned(const std::string& rules, const std::vector<std::string>& names,
             std::uint64_t experts) {
  std::vector<FakeTensor> sources;
  for (const std::string& name : names) sources.push_back({name, {2}});
  PlanOptions options;
  options.rules = rules_from_json(rules);
  return make_plan(fake_catalog(sources), skeleton_of({target_of("t", {experts, 4})}), options);
}

constexpr const char* joined = R"j([{"op": "stack_concat", "targets": ["t"], "dims": [0, 1],
    "sources": ["e\\.(\\d+)\\.gate", "e\\.(\\d+)\\.up"]}])j";

TEST(SeriesInRules, ALostExpertBesideAStrayOneIsAnError) {
  for (const char* stray : {"4", "4000000000", "99999999999999999999", "02"}) {
    std::vector<std::string> names = {"e.0.up", "e.2.up", "e.3.up", fmt::format("e.{}.up", stray)};
    for (const int e : {0, 1, 2, 3}) names.push_back(fmt::format("e.{}.gate", e));
    const Plan plan = planned(joined, names, 4);
    EXPECT_FALSE(plan.ok()) << stray;
    const auto findings = found(plan, "plan.missing");
    ASSERT_EQ(findings.size(), 1u) << stray;
    EXPECT_EQ(findings[0].sources.front(), "e.1.up");
    EXPECT_THAT(findings[0].message, HasSubstr("'e.1.up'"));
  }
}

TEST(SeriesInRules, StacksThatAreJoinedInTheStackedDimension) {
  PlanOptions options;
  options.rules = rules_from_json(R"j([{"op": "stack_concat", "targets": ["t"], "dims": [0, -2],
    "sources": ["e\\.(\\d+)\\.gate", "e\\.(\\d+)\\.up"]}])j");
  const auto plan_without = [&](const std::vector<std::string>& lost) {
    std::vector<FakeTensor> sources;
    for (const int e : {0, 1, 2}) {
      for (const char* part : {"gate", "up"}) {
        const std::string name = fmt::format("e.{}.{}", e, part);
        if (std::ranges::count(lost, name) == 0) sources.push_back({name, {4}});
      }
    }
    return make_plan(fake_catalog(sources), skeleton_of({target_of("t", {6, 4})}), options);
  };
  EXPECT_TRUE(plan_without({}).ok());
  for (const std::vector<std::string>& lost :
       {std::vector<std::string>{"e.1.up"}, {"e.2.gate", "e.2.up"}}) {
    const auto findings = found(plan_without(lost), "plan.missing");
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].sources, lost);
  }
}

TEST(SeriesInRules, PartnersOfAConcatHaveTheSameNumbers) {
  const char* const rules = R"j([{"op": "concat", "targets": ["t"], "dim": 0,
    "sources": ["e\\.(\\d+)\\.gate", "e\\.(\\d+)\\.up"]}])j";
  PlanOptions options;
  options.rules = rules_from_json(rules);
  const auto plan_of = [&](const char* last) {
    return make_plan(
        fake_catalog({{"e.0.gate", {2}}, {"e.1.gate", {2}}, {"e.0.up", {2}}, {last, {2}}}),
        skeleton_of({target_of("t", {8})}), options);
  };
  EXPECT_TRUE(plan_of("e.1.up").ok());
  const auto findings = found(plan_of("e.2.up"), "plan.missing");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].sources, ElementsAre("e.1.up", "e.2.gate"));
}

TEST(SeriesInRules, OneExpertInTwoSpellingsIsAnError) {
  const char* const rules =
      R"j([{"op": "stack", "sources": ["e(\\d+)"], "targets": ["t"], "dim": 0}])j";
  PlanOptions options;
  options.rules = rules_from_json(rules);
  const auto catalog = fake_catalog({{"e0", {4}}, {"e1", {4}}, {"e01", {4}}});
  for (const std::uint64_t count : {2u, 3u}) {
    const Plan plan = make_plan(catalog, skeleton_of({target_of("t", {count, 4})}), options);
    EXPECT_FALSE(plan.ok());
    EXPECT_THAT(plan.findings.front().message, HasSubstr("e01"));
  }
}

TEST(SeriesInRules, NumbersMayBeginAtOneOnlyIfTheyAreComplete) {
  PlanOptions options;
  options.rules = rules_from_json(
      R"j([{"op": "stack", "sources": ["e\\.(\\d+)"], "targets": ["t"], "dim": 0}])j");
  const auto plan_to = [&](int last) {
    std::vector<FakeTensor> sources;
    for (int e = 1; e <= last; ++e) sources.push_back({fmt::format("e.{}", e), {4}});
    return make_plan(fake_catalog(sources), skeleton_of({target_of("t", {4, 4})}), options);
  };
  EXPECT_TRUE(plan_to(4).ok());
  const auto findings = found(plan_to(3), "plan.missing");
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].sources, ElementsAre("e.0"));
}

TEST(SeriesInRules, WhatThePatternDoesNotFindIsNotMissed) {
  for (const char* pattern : {"l\\\\.(4[0-7])\\\\.w", "l\\\\.([4-7])\\\\.w"}) {
    const std::string rules = fmt::format(
        R"j([{{"op": "stack", "sources": ["{}"], "targets": ["t"], "dim": 0}}])j", pattern);
    const bool is_wide = std::string_view(pattern).find("4[") != std::string_view::npos;
    std::vector<FakeTensor> sources;
    const int first = is_wide ? 40 : 4;
    const int count = is_wide ? 8 : 4;
    for (int i = 0; i < count; ++i) sources.push_back({fmt::format("l.{}.w", first + i), {4}});
    PlanOptions options;
    options.rules = rules_from_json(rules);
    const auto shape = Shape({static_cast<std::uint64_t>(count), 4});
    const Skeleton skeleton = skeleton_of({target_of("t", shape)});
    const Plan plan = make_plan(fake_catalog(sources), skeleton, options);
    EXPECT_TRUE(plan.ok()) << plan.findings.front().message;
    sources.erase(sources.begin() + 1);  // control
    EXPECT_FALSE(make_plan(fake_catalog(sources), skeleton, options).ok());
  }
}

}  // namespace
}  // namespace loadstone::test
