#include "cli/bench_report.h"

#include <gmock/gmock.h>

namespace loadstone::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr std::uint64_t bytes = 1'000'000'000;

Series at(std::vector<double> gigabytes_per_second) {
  Series series{.bytes = bytes, .seconds = {}};
  for (const double rate : gigabytes_per_second) series.seconds.push_back(1 / rate);
  return series;
}

BenchFigures figures(double load_from_page_cache, double load_from_disk, double processor_share) {
  BenchFigures figures;
  figures.checkpoint = "model";
  figures.page_cache_to_new_memory = at({4});
  figures.disk = at({1});
  figures.load_from_page_cache = {at({load_from_page_cache}), {processor_share}, 4};
  figures.load_from_disk = {at({load_from_disk}), {processor_share}, 4};
  return figures;
}

TEST(BenchReport, RatesAreMediansAndExtremes) {
  const Series series = at({1, 4, 2});
  EXPECT_DOUBLE_EQ(series.median(), 2e9);
  EXPECT_DOUBLE_EQ(series.lowest(), 1e9);
  EXPECT_DOUBLE_EQ(series.highest(), 4e9);
  EXPECT_DOUBLE_EQ(Series{}.median(), 0);
}

TEST(BenchReport, ALoadNearItsLimitIsBoundByIt) {
  const BenchFigures near = figures(3.6, 0.9, 1);
  EXPECT_DOUBLE_EQ(page_cache_verdict(near).of_limit, 0.9);
  EXPECT_EQ(page_cache_verdict(near).bound, Bound::page_cache_to_new_memory);
  EXPECT_EQ(disk_verdict(near)->bound, Bound::disk);
  EXPECT_DOUBLE_EQ(disk_verdict(near)->of_limit, 0.9);
}

TEST(BenchReport, ALoadReachesAtMostItsLimit) {
  const BenchFigures fast = figures(4.4, 1.3, 1);
  EXPECT_DOUBLE_EQ(page_cache_verdict(fast).of_limit, 1);
  EXPECT_DOUBLE_EQ(disk_verdict(fast)->of_limit, 1);
}

TEST(BenchReport, BusyThreadsFarFromTheLimitAreBoundByTheProcessor) {
  const BenchFigures busy = figures(0.5, 0.3, 0.97);
  EXPECT_EQ(page_cache_verdict(busy).bound, Bound::processor);
  EXPECT_EQ(disk_verdict(busy)->bound, Bound::processor);
}

TEST(BenchReport, IdleThreadsFarFromTheLimitWait) {
  const BenchFigures idle = figures(0.5, 0.3, 0.2);
  EXPECT_THAT(to_text(idle, {}),
              HasSubstr("its 4 readers wait for data: compare with --threads 8"));
  EXPECT_EQ(page_cache_verdict(idle).bound, Bound::waiting);
  EXPECT_EQ(disk_verdict(idle)->bound, Bound::waiting);
}

// If a load from the page cache takes the same time, the disk does not limit the load.
TEST(BenchReport, ALoadThatIsAsQuickFromTheDiskIsBoundByWhatBoundsItAnyway) {
  BenchFigures same = figures(0.5, 0.49, 0.2);
  EXPECT_EQ(disk_verdict(same)->bound, Bound::waiting);
  same.load_from_page_cache.processor_shares = {1};
  EXPECT_EQ(disk_verdict(same)->bound, Bound::processor);
}

TEST(BenchReport, EncodingsHaveRows) {
  BenchFigures encoding = figures(3.6, 0.9, 1);
  encoding.encode["nf4"] = at({0.5});
  EXPECT_THAT(to_text(encoding, {}), HasSubstr("encode BF16 to nf4"));
  EXPECT_THAT(to_json(encoding), HasSubstr("\"encode_nf4\": {"));
}

TEST(BenchReport, ReasonsStandWhereNothingWasMeasured) {
  BenchFigures half = figures(3.6, 0.9, 1);
  half.disk.seconds.clear();
  half.load_from_disk = {};
  half.no_disk = half.no_disk_load = "nobody knows";
  EXPECT_FALSE(disk_verdict(half));
  const std::string text = to_text(half, {});
  EXPECT_THAT(text, HasSubstr("a load from the page cache reaches 90 % of the limit"));
  EXPECT_THAT(text, Not(HasSubstr("a load from the disk comes")));
  EXPECT_THAT(text, HasSubstr("not measured: nobody knows"));
  const std::string json = to_json(half);
  EXPECT_THAT(json, HasSubstr("\"limits.disk\": \"nobody knows\""));
  EXPECT_THAT(json, HasSubstr("\"disk\": null"));
}

}  // namespace
}  // namespace loadstone::cli
