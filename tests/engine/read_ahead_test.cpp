// Tests requests ahead of reads: only planned bytes, each byte once, and before its read.
#include "engine/read_ahead.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <mutex>
#include <random>
#include <string>
#include <thread>

namespace loadstone::test {
namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

// A source that records requests and has no bytes. Thread-safe.
class Asked final : public ByteSource {
 public:
  [[nodiscard]] const std::string& path() const noexcept override { return path_; }
  [[nodiscard]] FileIdentity identity() const override { return {}; }
  using ByteSource::read;
  void read(std::uint64_t, std::span<const std::span<std::byte>>) override { ++reads; }
  std::uint64_t prefetch(std::uint64_t offset, std::uint64_t bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    ranges.push_back({offset, offset + bytes});
    return bytes;
  }

  std::vector<ByteRange> ranges;
  std::atomic<unsigned> reads = 0;

 private:
  std::mutex mutex_;
  std::string path_ = "/asked";
};

class ReadAheadTest : public testing::Test {
 protected:
  void read(const ReadAhead& ahead, std::uint32_t shard, std::uint64_t offset,
            std::uint64_t bytes) const {
    std::byte* const none = nullptr;
    ahead.sources()[shard]->read(offset, std::span(none, bytes));
  }
  [[nodiscard]] std::vector<ByteRange> asked(std::uint32_t shard) const {
    std::vector<ByteRange> ranges = files[shard]->ranges;
    std::ranges::sort(ranges, {}, &ByteRange::begin);
    return ranges;
  }
  [[nodiscard]] std::vector<std::shared_ptr<ByteSource>> shards() const {
    return {files.begin(), files.end()};
  }

  std::vector<std::shared_ptr<Asked>> files = {std::make_shared<Asked>(),
                                               std::make_shared<Asked>()};
};

TEST_F(ReadAheadTest, AsksForWhatFollowsInThePlan) {
  ReadAhead ahead(std::vector<ShardRange>{{0, {100, 100 + 40 * mib}}}, shards(), 16 * mib);
  read(ahead, 0, 100, 4 * mib);
  EXPECT_EQ(asked(0).front().begin, 100u);
  EXPECT_EQ(asked(0).back().end, 100 + 20 * mib);
  EXPECT_EQ(ahead.bytes_asked(), 20 * mib);
  read(ahead, 0, 100 + 4 * mib, 4 * mib);
  EXPECT_EQ(asked(0).back().end, 100 + 24 * mib);
  read(ahead, 0, 100 + 36 * mib, 4 * mib);
  EXPECT_EQ(asked(0).back().end, 100 + 40 * mib);
  EXPECT_EQ(files[0]->reads, 3u);
}

// The bytes between slices of a process, or between the requested tensors, must not be requested.
TEST_F(ReadAheadTest, LeavesOutWhatIsNotPlannedAndGoesOnInTheNextShard) {
  ReadAhead ahead(std::vector<ShardRange>{{0, {0, mib}}, {0, {50 * mib, 51 * mib}}, {1, {7, 9}}},
                  shards(), 16 * mib);
  read(ahead, 0, 0, mib);
  EXPECT_THAT(asked(0), testing::ElementsAre(ByteRange{0, mib}, ByteRange{50 * mib, 51 * mib}));
  EXPECT_THAT(asked(1), testing::ElementsAre(ByteRange{7, 9}));
}

// The first reads may be at the end of the files, where scales and adapters can be stored.
TEST_F(ReadAheadTest, AReadFarAheadTakesNothingFromThoseBefore) {
  ReadAhead ahead(std::vector<ShardRange>{{0, {0, 400 * mib}}, {1, {0, mib}}}, shards(), 16 * mib);
  read(ahead, 1, 0, mib);
  read(ahead, 0, 0, 4 * mib);
  EXPECT_EQ(asked(0).front().begin, 0u);
  EXPECT_EQ(asked(0).back().end, 20 * mib);
  EXPECT_EQ(asked(1).size(), 1u);
  EXPECT_EQ(ahead.bytes_asked(), 21 * mib);
}

TEST_F(ReadAheadTest, ReadsOutsideThePlanAskForNothingOfTheirOwn) {
  ReadAhead ahead(std::vector<ShardRange>{{0, {10 * mib, 11 * mib}}}, shards(), 16 * mib);
  read(ahead, 0, 0, 100);  // at the start
  EXPECT_THAT(asked(0), testing::ElementsAre(ByteRange{10 * mib, 11 * mib}));
  read(ahead, 0, 300 * mib, 100);  // at the end
  read(ahead, 1, 0, 100);
  EXPECT_EQ(ahead.bytes_asked(), mib);
}

TEST_F(ReadAheadTest, NothingIsAskedWhereItIsOffOrNothingIsPlanned) {
  const std::vector<ShardRange> reads = {{0, {0, mib}}};
  const ReadAhead off(reads, shards(), 0);
  EXPECT_EQ(off.sources()[0], files[0]);
  read(off, 0, 0, mib);
  ReadAhead none({}, shards(), 16 * mib);
  read(none, 0, 0, mib);
  EXPECT_EQ(files[0]->ranges.size(), 0u);
  // Control.
  ReadAhead on(reads, shards(), 16 * mib);
  read(on, 0, 0, mib);
  EXPECT_EQ(files[0]->ranges.size(), 1u);
}

TEST_F(ReadAheadTest, ShardsThatAreNotOpenAreLeftOut) {
  const std::vector<std::shared_ptr<ByteSource>> some = {files[0], nullptr};
  ReadAhead ahead(std::vector<ShardRange>{{0, {0, mib}}, {1, {0, mib}}}, some, 16 * mib);
  EXPECT_EQ(ahead.sources()[1], nullptr);
  read(ahead, 0, 0, mib);
  EXPECT_EQ(ahead.bytes_asked(), mib);
}

// Four threads read the ranges of random plans.
TEST_F(ReadAheadTest, EachPlannedByteOnceWhateverTheOrder) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    for (auto& file : files) file = std::make_shared<Asked>();
    std::vector<ShardRange> reads;
    for (std::uint32_t shard = 0; shard < 2; ++shard) {
      std::uint64_t at = random() % 1000;
      for (unsigned i = 0; i < random() % 40; ++i) {
        const std::uint64_t end = at + 1 + random() % (random() % 2 == 0 ? 1000 : 9 * mib);
        reads.push_back({shard, {at, end}});
        at = end + 1 + random() % (20 * mib);
      }
    }
    ReadAhead ahead(reads, shards(), random() % (40 * mib) + 1);
    std::vector<ShardRange> order = reads;
    std::ranges::shuffle(order, random);
    std::atomic<std::size_t> next = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (std::size_t i = next++; i < order.size(); i = next++) {
          read(ahead, order[i].shard, order[i].bytes.begin, order[i].bytes.size());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<ShardRange> joined;
    for (std::uint32_t shard = 0; shard < 2; ++shard) {
      for (const ByteRange& range : asked(shard)) {
        if (!joined.empty() && joined.back().shard == shard &&
            joined.back().bytes.end == range.begin) {
          joined.back().bytes.end = range.end;
        } else {
          joined.push_back({shard, range});
        }
      }
    }
    ASSERT_TRUE(joined == reads);
  }
}

}  // namespace
}  // namespace loadstone::test
