// Random boxes against a copier that moves one element after the other.
#include "execute/random_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "execute/plan_builder.h"
#include "loadstone/execute.h"
#include "plan/budget.h"

namespace loadstone {
namespace {

using testing::expected_value;
using testing::pattern;
using testing::PlanBuilder;
using testing::random_plan;
using testing::value_of;

// All that is read is asked for ahead, and nothing else.
void expect_all_asked(const Plan& plan, const Needs& needs, const PlanBuilder& builder) {
  using Range = std::tuple<std::string, std::uint64_t, std::uint64_t>;
  auto events = builder.storage.asked();
  std::ranges::sort(events, {},
                    [](const auto& each) { return std::tuple(each.path, each.offset); });
  std::vector<Range> asked;
  for (const auto& each : events) {
    const bool goes_on = !asked.empty() && std::get<0>(asked.back()) == each.path &&
                         std::get<2>(asked.back()) == each.offset;
    if (!goes_on) asked.emplace_back(each.path, each.offset, each.offset);
    std::get<2>(asked.back()) += each.bytes;
  }
  std::vector<Range> planned;
  std::uint64_t bytes = 0;
  for (const ShardRange& range : needs.reads()) {
    planned.emplace_back(plan.catalog->shards()[range.shard].path, range.bytes.begin,
                         range.bytes.end);
    bytes += range.bytes.size();
  }
  std::ranges::sort(planned);
  EXPECT_EQ(asked, planned);
  EXPECT_GE(bytes, needs.bytes_to_read());
}

void load_random_plan(unsigned seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  PlanBuilder builder;
  builder.staging_bytes_max = std::uint64_t{1} << random() % 21;
  Plan plan = random_plan(random, builder);
  plan.threads = static_cast<unsigned>(1 + random() % 4);
  const HostMemory memory(plan);
  const Report report = execute(plan, memory.destinations(),
                                {.threads = static_cast<unsigned>(1 + random() % 4),
                                 .chunk_bytes = std::uint64_t{1} << random() % 23,
                                 .storage = &builder.storage});
  const Needs needs(plan, SinkKind::memory);
  const std::uint64_t promised = bytes_promised(plan, needs);
  EXPECT_LE(report.staging_bytes_peak, promised);
  EXPECT_LE(promised, std::max(builder.staging_bytes_max, needs.thread_bytes_least()));
  expect_all_asked(plan, needs, builder);
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    // Not EXPECT_EQ: it would print megabytes.
    EXPECT_TRUE(value_of(memory.destinations()[i]) == expected_value(builder, plan.targets[i]))
        << plan.targets[i].name;
    EXPECT_EQ(report.provenance[i].bytes_written, plan.targets[i].byte_count());
  }
}

TEST(RandomPlanTest, GivesTheSameBytesAsThePlainCopier) {
  for (unsigned seed = 0; seed < 1500 && !HasFailure(); ++seed) load_random_plan(seed);
}

// The control: the comparison sees one wrong byte.
TEST(RandomPlanTest, TheComparisonSeesOneWrongByte) {
  PlanBuilder builder;
  builder.add_plain("a", Dtype::f32, Dtype::f32, {1000}, pattern(4000, 1));
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  execute(plan, memory.destinations(), {.storage = &builder.storage});
  memory.destinations()[0].data[1234] ^= std::byte{1};
  EXPECT_FALSE(value_of(memory.destinations()[0]) == expected_value(builder, plan.targets[0]));
}

}  // namespace
}  // namespace loadstone
