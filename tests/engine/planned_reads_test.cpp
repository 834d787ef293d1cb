// Tests which byte ranges loadstone requests from the system ahead of its reads.
#include <gmock/gmock.h>

#include "engine/box_read.h"
#include "loadstone/execute.h"
#include "plan/values.h"
#include "support/plan_builder.h"

namespace loadstone {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using testing::pattern;
using testing::PlanBuilder;

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr std::uint64_t rows = 3;

class PlannedReadsTest : public ::testing::Test {
 protected:
  // Adds a target for some columns of a matrix whose rows take 1 MiB each.
  void add_columns(std::uint64_t begin, std::uint64_t count, Dtype dtype) {
    const auto source = builder.add_tensor("w", Dtype::u8, {rows, mib}, pattern(rows * mib, 1));
    builder.add_target(
        "w", dtype, {rows, count},
        {{.source = source, .source_offset = begin, .dims = {{rows, mib, count}, {count, 1, 1}}}});
  }

  // Loads, compares, and returns the planned ranges within the first shard's data.
  std::vector<ByteRange> asked() {
    const Plan plan = builder.build();
    const Report report = load_and_compare(builder, plan);
    std::vector<std::uint32_t> all;
    for (std::uint32_t i = 0; i < plan.targets.size(); ++i) all.push_back(i);
    const std::uint64_t data = plan.catalog->shards()[0].data_begin;
    std::vector<ByteRange> found;
    std::uint64_t bytes = 0;
    for (const ShardRange& range : planned_reads(values_of(plan), all)) {
      found.push_back({range.bytes.begin - data, range.bytes.end - data});
      bytes += range.bytes.size();
    }
    EXPECT_EQ(report.bytes_read_ahead, bytes);
    return found;
  }

  PlanBuilder builder;
};

TEST_F(PlannedReadsTest, LongPiecesOfRowsAreOneEach) {
  add_columns(mib / 2, mib / 4, Dtype::u8);
  EXPECT_THAT(asked(), ElementsAre(ByteRange{mib / 2, mib / 4 * 3},
                                   ByteRange{mib + mib / 2, mib + mib / 4 * 3},
                                   ByteRange{2 * mib + mib / 2, 2 * mib + mib / 4 * 3}));
}

TEST_F(PlannedReadsTest, ShortPiecesFarApartAreLeftToTheReaders) {
  add_columns(mib / 2, mib / 16, Dtype::u8);
  EXPECT_THAT(asked(), IsEmpty());
}

TEST_F(PlannedReadsTest, WhatIsReadOverIsAskedFor) {
  add_columns(100, mib - 50'000, Dtype::i32);  // casts are staged, including the gaps between rows
  EXPECT_THAT(asked(), ElementsAre(ByteRange{100, rows * mib - 50'000 + 100}));
}

TEST_F(PlannedReadsTest, NeighboursAreOneUnlessALargerHoleIsBetweenThem) {
  for (const std::size_t gap : {0, 4096, 4097}) {
    const std::string name = "t" + std::to_string(gap);
    const auto source = builder.add_tensor(name, Dtype::u8, {100}, pattern(100, gap), gap);
    builder.add_target(name, Dtype::u8, {100}, {testing::whole(source, {100})});
  }
  EXPECT_THAT(asked(), ElementsAre(ByteRange{0, 4296}, ByteRange{8393, 8493}));
}

// The run executes only a part of the plan, like one of several processes.
TEST_F(PlannedReadsTest, WhatThisRunDoesNotMakeIsNotAskedFor) {
  builder.add_plain("a", Dtype::u8, Dtype::u8, {mib}, pattern(mib, 1));
  builder.add_plain("b", Dtype::u8, Dtype::u8, {mib}, pattern(mib, 2));
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  std::vector<Destination> destinations(memory.destinations().begin(), memory.destinations().end());
  destinations[1].data = nullptr;
  const Report report = execute(plan, destinations, {.storage = &builder.storage});
  EXPECT_EQ(report.bytes_read, mib);
  EXPECT_EQ(report.bytes_read_ahead, mib);
}

// The box is outside its source. planned_reads() ignores it, and the reader rejects it.
TEST_F(PlannedReadsTest, ABoxThatLeavesItsSourceIsNobodys) {
  add_columns(mib / 2, mib / 4, Dtype::u8);
  Plan plan = builder.build();
  Box& box = plan.targets[0].recipe.boxes[0];
  for (const std::uint64_t extent : {rows + 1, UINT64_MAX}) {
    box.dims[0].extent = extent;
    EXPECT_THAT(planned_reads(values_of(plan), std::vector<std::uint32_t>{0}), IsEmpty());
  }
  box.source = 7;
  EXPECT_THAT(planned_reads(values_of(plan), std::vector<std::uint32_t>{0}), IsEmpty());
}

}  // namespace
}  // namespace loadstone
