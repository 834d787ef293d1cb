// Tests that loadstone adds reader threads only while each addition makes the load faster.
#include "engine/reader_growth.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>

#include "engine/run_team.h"

namespace loadstone::test {
namespace {

// Returns measurements of one second in which each reader used the fraction `busy` of a core.
WorkPeriod period(double bytes_per_second, double busy) {
  return {.seconds = 1,
          .processor_seconds = busy,
          .bytes = static_cast<std::uint64_t>(bytes_per_second)};
}

TEST(ReaderGrowth, GoesOnWhileTheRateGrows) {
  ReaderGrowth growth(2, 16, 2);
  EXPECT_EQ(growth.after(period(1e9, 0.2)), 3u);
  EXPECT_EQ(growth.after(period(1.5e9, 0.3)), 4u);
  EXPECT_EQ(growth.after(period(2e9, 0.4)), 6u);
  EXPECT_EQ(growth.after(period(3e9, 0.6)), 9u);
  EXPECT_EQ(growth.after(period(4e9, 0.6)), 13u);
  EXPECT_EQ(growth.after(period(5e9, 0.6)), 16u);
  EXPECT_EQ(growth.after(period(9e9, 0.6)), 16u);
}

// The disk is saturated, so more readers do not help.
TEST(ReaderGrowth, EndsForGoodWhereTheLastOnesWereOfNoUse) {
  ReaderGrowth growth(2, 16, 8);
  EXPECT_EQ(growth.after(period(1e9, 0.2)), 3u);
  EXPECT_EQ(growth.after(period(1.05e9, 0.2)), 3u);
  EXPECT_EQ(growth.after(period(3e9, 0.2)), 3u);
}

// If two cores are busy with copies from the page cache, a third reader cannot run.
TEST(ReaderGrowth, BusyCoresGetNoMoreReadersUnlessTheyWaitLater) {
  ReaderGrowth growth(2, 16, 2);
  EXPECT_EQ(growth.after(period(3e9, 1.9)), 2u);
  EXPECT_EQ(growth.after(period(3e9, 1.5)), 2u);
  EXPECT_EQ(growth.after(period(1e9, 0.5)), 3u);  // the rest of the file is not cached
}

TEST(ReaderGrowth, MoreCoresThanReadersAreTried) {
  ReaderGrowth growth(4, 16, 64);
  EXPECT_EQ(growth.after(period(8e9, 4)), 6u);
  EXPECT_EQ(growth.after(period(12e9, 6)), 9u);
  EXPECT_EQ(growth.after(period(12.5e9, 9)), 9u);
}

// Measurements of readers that are limited by the CPU do not apply once a disk limits them.
TEST(ReaderGrowth, BeginsAnewWhereTheCachedPartEnds) {
  ReaderGrowth growth(4, 16, 64);
  EXPECT_EQ(growth.after(period(8e9, 4)), 6u);
  EXPECT_EQ(growth.after(period(1e9, 0.5)), 6u);
  EXPECT_EQ(growth.after(period(1e9, 0.5)), 9u);
  EXPECT_EQ(growth.after(period(0.6e9, 0.5)), 9u);  // more readers make this disk slower
  EXPECT_EQ(growth.after(period(0.6e9, 0.5)), 9u);
}

TEST(ReaderGrowth, WantsNoMoreThanTheSystemGives) {
  ReaderGrowth growth(4, 16, 64);
  growth.have(3);
  EXPECT_EQ(growth.readers(), 3u);
  EXPECT_EQ(growth.after(period(8e9, 3)), 3u);
}

TEST(ReaderGrowth, ShortPeriodsSayNothing) {
  const ReaderGrowth growth(1, 2, 2);
  EXPECT_FALSE(growth.is_enough({.seconds = 0.1, .bytes = 1 << 30}));
  EXPECT_FALSE(growth.is_enough({.seconds = 3, .bytes = 1 << 20}));
  EXPECT_TRUE(growth.is_enough({.seconds = 0.2, .bytes = 64 << 20}));
}

// The readers sleep, as on a slow file system. The test ends even if no reader joins.
TEST(ReaderGrowth, ThreadsJoinTheWorkThatGoesOn) {
  const auto readers_of = [](ReaderGrowth growth) {
    std::atomic<bool> stop = false;
    std::atomic<std::uint64_t> bytes = 0;
    std::mutex mutex;
    std::set<std::thread::id> seen;
    run_team(
        growth, stop, nullptr, [&] { return Progress{.bytes_done = bytes}; },
        [&] {
          for (int i = 0; i < 400; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            bytes += 1 << 20;
            const std::lock_guard lock(mutex);
            seen.insert(std::this_thread::get_id());
            if (seen.size() > 2) return;
          }
        });
    return seen.size();
  };
  EXPECT_GT(readers_of(ReaderGrowth(1, 8, 2)), 1u);
  EXPECT_EQ(readers_of(ReaderGrowth(1, 1, 2)), 1u);  // control
}

}  // namespace
}  // namespace loadstone::test
