// Compares loads of random boxes with a plain loop that copies one element at a time.
#include "support/random_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "engine/box_read.h"
#include "engine/limits.h"
#include "loadstone/execute.h"
#include "plan/values.h"
#include "receipt/file_digest.h"
#include "support/plan_builder.h"

namespace loadstone::testing {
namespace {

using Ranges = std::map<std::string, std::vector<ByteRange>>;

// Sorts ranges and joins adjacent ones.
Ranges joined(Ranges ranges) {
  for (auto& [path, of_file] : ranges) {
    std::ranges::sort(of_file, {}, &ByteRange::begin);
    std::vector<ByteRange> runs;
    for (const ByteRange range : of_file) {
      if (runs.empty() || range.begin > runs.back().end) runs.push_back(range);
      runs.back().end = std::max(runs.back().end, range.end);
    }
    of_file = std::move(runs);
  }
  return ranges;
}

Ranges ranges_of(const std::vector<ReadEvent>& events) {
  Ranges ranges;
  for (const ReadEvent& event : events) {
    ranges[event.path].push_back({event.offset, event.offset + event.bytes});
  }
  return joined(ranges);
}

// Expects that the run requests exactly the planned ranges ahead, and reads no others except small
// gaps between two ranges.
void expect_all_asked(const Plan& plan, const PlanBuilder& builder) {
  std::vector<std::uint32_t> all(plan.targets.size());
  std::iota(all.begin(), all.end(), 0U);
  Ranges planned;
  for (const ShardRange& range : planned_reads(values_of(plan), all)) {
    planned[plan.catalog->shards()[range.shard].path].push_back(range.bytes);
  }
  const Ranges asked = ranges_of(builder.storage.asked());
  EXPECT_EQ(asked, joined(planned));
  Ranges read = ranges_of(builder.storage.reads());
  for (const auto& [path, ranges] : asked) {
    for (const ByteRange range : ranges) {
      std::uint64_t at = range.begin;
      for (const ByteRange run : read[path]) {
        if (run.end <= at || run.begin >= range.end) continue;
        EXPECT_LE(run.begin, at + staged_hole_bytes_max);
        at = run.end;
      }
      EXPECT_GE(at, range.end);
    }
  }
}

// Expects digests that do not depend on the order of the engine's reads.
void expect_true(const Receipt& receipt, PlanBuilder& builder, const HostMemory& memory) {
  for (const ReceiptFile& file : receipt.sources) {
    const auto source = builder.storage.open(file.path);
    EXPECT_EQ(file.header_digest, file_digest(receipt.kind, *source, 0, file.header_ranges));
    for (const ReceiptTensor& tensor : file.tensors) {
      EXPECT_EQ(tensor.digest, file_digest(receipt.kind, *source, tensor.begin, ranges_of(tensor)))
          << tensor.name;
    }
  }
  for (std::size_t i = 0; i < receipt.targets.size(); ++i) {
    EXPECT_EQ(receipt.targets[i].digest,
              digest_of(receipt.kind, value_of(memory.destinations()[i])))
        << receipt.targets[i].name;
  }
}

// Returns a digest kind for every second seed, so that every second load makes a receipt.
std::optional<DigestKind> digest_of_seed(unsigned seed) {
  if (seed % 2 == 0) return std::nullopt;
  const bool is_slow = seed % 8 == 1 && can_digest(DigestKind::sha256_tree);
  return is_slow ? DigestKind::sha256_tree : DigestKind::xxh3_128;
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
                                 .storage = &builder.storage,
                                 .receipt = digest_of_seed(seed)});
  const ValueSet values = values_of(plan);
  const Limits limits = limits_of(plan, values);
  const std::uint64_t promised = testing::bytes_promised(plan);
  EXPECT_LE(report.staging_bytes_peak, promised);
  EXPECT_LE(promised, std::max(builder.staging_bytes_max, limits.thread_bytes_least()));
  expect_all_asked(plan, builder);
  ASSERT_EQ(report.receipt != nullptr, seed % 2 == 1);
  if (report.receipt != nullptr) expect_true(*report.receipt, builder, memory);
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    // EXPECT_EQ would print megabytes if the values differ.
    EXPECT_TRUE(value_of(memory.destinations()[i]) == expected_value(builder, plan.targets[i]))
        << plan.targets[i].name;
    EXPECT_EQ(report.provenance[i].bytes_written, plan.targets[i].byte_count());
  }
}

TEST(RandomPlanTest, GivesTheSameBytesAsThePlainCopier) {
  for (unsigned seed = 0; seed < 1500 && !HasFailure(); ++seed) load_random_plan(seed);
}

// Reads a column slice with gaps of 3 KiB between its rows. There are more gaps than a reader can
// buffer at once.
TEST(RandomPlanTest, ADigestHasEachOfManyHoles) {
  for (const std::uint64_t chunk : {std::uint64_t{40'000}, std::uint64_t{8} << 20}) {
    for (const unsigned threads : {1u, 3u}) {
      PlanBuilder builder;
      const auto source = builder.add_tensor("w", Dtype::f32, {300, 2816}, pattern(3'379'200, 1));
      builder.add_target("w", Dtype::f32, {300, 2048},
                         {{.source = source, .dims = {{300, 2816, 2048}, {2048, 1, 1}}}});
      const Plan plan = builder.build();
      const HostMemory memory(plan);
      const Report report = execute(plan, memory.destinations(),
                                    {.threads = threads,
                                     .chunk_bytes = chunk,
                                     .storage = &builder.storage,
                                     .receipt = DigestKind::xxh3_128});
      expect_true(*report.receipt, builder, memory);
      // The gaps must be read together with the rows, or this test would prove nothing.
      EXPECT_LT(builder.storage.reads().size(), 150u);
    }
  }
}

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
}  // namespace loadstone::testing
