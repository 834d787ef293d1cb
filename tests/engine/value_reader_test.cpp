// Tests that ValueReader returns the bytes of execute() for any range of any value.
#include "engine/value_reader.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <random>

#include "catalog/open_shards.h"
#include "loadstone/execute.h"
#include "plan/costs.h"
#include "plan/values.h"
#include "support/plan_builder.h"
#include "support/random_plan.h"

namespace loadstone::testing {
namespace {

// A reader of the builder's shards. Not thread-safe.
class Pulled {
 public:
  Pulled(PlanBuilder& builder, const Plan& plan, std::uint64_t staging_bytes)
      : shards_(*plan.catalog, &builder.storage),
        reader(*plan.catalog, shards_.sources(), staging_bytes, stop) {}

  std::atomic<bool> stop = false;

 private:
  OpenShards shards_;

 public:
  ValueReader reader;
};

// Compares the whole value, then ranges of random length in random order.
void compare_ranges(Pulled& pulled, const Plan& plan, std::size_t index,
                    const Destination& expected, std::mt19937_64& random) {
  const PlannedTarget& target = plan.targets[index];
  const std::uint64_t elements = *target.shape.numel();
  const std::uint64_t size = bits(target.dtype) / 8;
  pulled.reader.open(loadstone::value_of(target), plan.decodings);
  Bytes all(elements * size);
  pulled.reader.read(0, elements, all);
  EXPECT_TRUE(all == value_of(expected)) << target.name;
  const std::uint64_t step = 1 + random() % std::max<std::uint64_t>(elements, 1);
  for (int i = 0; i < 8; ++i) {
    const std::uint64_t begin = random() % (elements + 1);
    const std::uint64_t end = std::min(elements, begin + random() % (step + 1));
    Bytes part((end - begin) * size, std::byte{0x5a});
    pulled.reader.read(begin, end, part);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), expected.data + begin * size))
        << target.name << " " << begin << " to " << end;
  }
}

void pull_random_plan(unsigned seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  PlanBuilder builder;
  const Plan plan = random_plan(random, builder);
  const HostMemory memory(plan);
  execute(plan, memory.destinations(), {.storage = &builder.storage});
  const std::uint64_t staging = std::uint64_t{1} << random() % 22;
  Pulled pulled(builder, plan, staging);
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    compare_ranges(pulled, plan, i, memory.destinations()[i], random);
  }
  EXPECT_LE(pulled.reader.staging_bytes_peak(), std::max(staging, reader_bytes_least));
}

TEST(ValueReaderTest, AnyRangeIsThatOfWhatExecuteWrites) {
  for (unsigned seed = 0; seed < 150 && !HasFailure(); ++seed) pull_random_plan(seed);
}

TEST(ValueReaderTest, EveryKindOfMovementInEverySmallRange) {
  PlanBuilder builder;
  add_all_movements(builder);
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  execute(plan, memory.destinations(), {.storage = &builder.storage});
  Pulled pulled(builder, plan, 0);
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    const std::uint64_t size = bits(target.dtype) / 8;
    const std::uint64_t elements = *target.shape.numel();
    pulled.reader.open(loadstone::value_of(target), plan.decodings);
    for (const std::uint64_t step : {61u, 977u}) {
      for (std::uint64_t begin = 0; begin < elements; begin += step) {
        Bytes part((std::min(elements, begin + step) - begin) * size);
        pulled.reader.read(begin, std::min(elements, begin + step), part);
        ASSERT_TRUE(
            std::equal(part.begin(), part.end(), memory.destinations()[i].data + begin * size))
            << target.name << " " << begin;
      }
    }
  }
}

// The values include weights with scales and GGUF blocks, whole and transposed.
TEST(ValueReaderTest, DecodingsAreDecodedWhereTheyAreNeeded) {
  PlanBuilder builder;
  const auto blocks =
      builder.add_tensor("q", BlockFormat::q8_0, {64, 512}, pattern(64 * 512 / 32 * 34, 1));
  const auto scales = builder.add_tensor("s", Dtype::u8, {3, 5}, Bytes(15, std::byte{129}));
  const auto weights = builder.add_tensor("w", Dtype::f8_e4m3, {96, 100}, pattern(9600, 2));
  builder.decodings = {{"mxfp4", {scales}, {1}, Dtype::f32},  // no box uses it, so it is never read
                       {"gguf", {blocks}, {64, 512}, Dtype::bf16},
                       {"fp8_block", {weights, scales}, {96, 100}, Dtype::f32}};
  const auto add = [&](const char* name, Dtype dtype, Shape shape, Box box, std::uint32_t number) {
    box.decoding = number;
    builder.add_target(name, dtype, std::move(shape), {std::move(box)});
  };
  add("rows", Dtype::bf16, {64, 512}, whole(blocks, {64, 512}), 1);
  add("cast", Dtype::f32, {64, 512}, whole(blocks, {64, 512}), 1);
  add("turned", Dtype::bf16, {512, 64}, {.source = blocks, .dims = {{512, 1, 64}, {64, 512, 1}}},
      1);
  add("fp8", Dtype::bf16, {96, 100}, whole(weights, {96, 100}), 2);
  Plan plan = builder.build();
  const Decoding unused = std::exchange(plan.decodings[0], plan.decodings[1]);
  const HostMemory memory(plan);
  execute(plan, memory.destinations(), {.storage = &builder.storage});
  plan.decodings[0] = unused;
  std::mt19937_64 random(7);
  for (const std::uint64_t staging : {0u, 8192u, 1u << 20}) {
    Pulled pulled(builder, plan, staging);
    for (int round = 0; round < 20; ++round) {
      for (std::size_t i = 0; i < plan.targets.size(); ++i) {
        compare_ranges(pulled, plan, i, memory.destinations()[i], random);
      }
    }
  }
}

// Requests every range of whole blocks in sequence.
TEST(ValueReaderTest, WhatIsContiguousIsReadOnce) {
  PlanBuilder builder;
  const auto blocks =
      builder.add_tensor("q", BlockFormat::q4_k, {40, 512}, pattern(40 * 512 / 256 * 144, 1));
  builder.decodings = {{"gguf", {blocks}, {40, 512}, Dtype::f32}};
  builder.add_target("decoded", Dtype::f32, {40, 512}, {whole(blocks, {40, 512})})
      .recipe.boxes[0]
      .decoding = 0;
  builder.add_plain("plain", Dtype::f32, Dtype::f32, {90, 256}, pattern(92160, 2));
  builder.add_plain("cast", Dtype::bf16, Dtype::f32, {90, 256}, pattern(46080, 3));
  const auto left = builder.add_tensor("l", Dtype::bf16, {64, 64}, pattern(8192, 4));
  const auto right = builder.add_tensor("r", Dtype::bf16, {64, 64}, pattern(8192, 5));
  builder.add_target("joined", Dtype::bf16, {64, 128},
                     {{.source = left, .dims = {{64, 64, 128}, {64, 1, 1}}},
                      {.source = right, .target_offset = 64, .dims = {{64, 64, 128}, {64, 1, 1}}}});
  const Plan plan = builder.build();
  std::uint64_t source_bytes = 0;
  for (const TensorInfo& tensor : plan.catalog->tensors()) source_bytes += tensor.byte_count();
  Pulled pulled(builder, plan, 4096);
  const std::uint64_t headers = builder.storage.bytes_read();
  for (const PlannedTarget& target : plan.targets) {
    pulled.reader.open(loadstone::value_of(target), plan.decodings);
    const std::uint64_t step = 5 * whole_elements;
    for (std::uint64_t begin = 0; begin < *target.shape.numel(); begin += step) {
      const std::uint64_t end = std::min(*target.shape.numel(), begin + step);
      Bytes part((end - begin) * bits(target.dtype) / 8);
      pulled.reader.read(begin, end, part);
    }
  }
  EXPECT_EQ(builder.storage.bytes_read() - headers, source_bytes);
  EXPECT_EQ(pulled.reader.bytes_read(), source_bytes);
}

// Four values share two bytes, so ranges must end at whole bytes.
TEST(ValueReaderTest, NumbersOfLessThanAByte) {
  PlanBuilder builder;
  builder.add_plain("f4", Dtype::f4, Dtype::f4, {8, 64}, pattern(256, 1));
  const Plan plan = builder.build();
  Pulled pulled(builder, plan, 0);
  pulled.reader.open(loadstone::value_of(plan.targets[0]), plan.decodings);
  Bytes part(100);
  pulled.reader.read(30, 230, part);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), builder.bytes_of(0).begin() + 15));
  EXPECT_EQ(error_of([&] { pulled.reader.read(31, 231, part); }).code(), "plan.box");
  EXPECT_EQ(error_of([&] { pulled.reader.read(0, 199, part); }).code(), "plan.box");
}

TEST(ValueReaderTest, WhatDoesNotFitIsRefused) {
  PlanBuilder builder;
  builder.add_plain("a", Dtype::f32, Dtype::f32, {10, 10}, pattern(400, 1));
  Plan plan = builder.build();
  Pulled pulled(builder, plan, 0);
  const Value good = loadstone::value_of(plan.targets[0]);
  const Shape small = {10, 9};
  pulled.reader.open(good, plan.decodings);
  Bytes part(40);
  EXPECT_EQ(error_of([&] { pulled.reader.read(91, 101, part); }).code(), "plan.box");
  EXPECT_EQ(error_of([&] { pulled.reader.read(20, 10, part); }).code(), "plan.box");
  EXPECT_EQ(error_of([&] { pulled.reader.read(0, 11, part); }).code(), "plan.box");
  const auto code = [&](auto change) {
    std::vector<Box> boxes = plan.targets[0].recipe.boxes;
    Value value = good;
    change(boxes[0], value);
    value.boxes = boxes;
    return error_of([&] { pulled.reader.open(value, plan.decodings); }).code();
  };
  EXPECT_EQ(code([](Box& box, Value&) { box.source = 1; }), "plan.box");
  EXPECT_EQ(code([](Box& box, Value&) { box.source_offset = 1; }), "plan.box");
  EXPECT_EQ(code([](Box& box, Value&) { box.dims[0].target_stride = 11; }), "plan.box");
  EXPECT_EQ(code([](Box& box, Value&) { box.dims[0].target_stride = 0; }), "plan.box");
  EXPECT_EQ(code([](Box& box, Value&) { box.decoding = 0; }), "plan.box");
  EXPECT_EQ(code([&](Box&, Value& value) { value.shape = &small; }), "plan.box");
  EXPECT_EQ(code([](Box&, Value& value) { value.dtype = Dtype::f4; }), "plan.box");
}

TEST(ValueReaderTest, AFailedReadNamesFileTensorAndOffset) {
  PlanBuilder builder;
  builder.add_plain("a", Dtype::f32, Dtype::f32, {100}, pattern(400, 1));
  const Plan plan = builder.build();
  Pulled pulled(builder, plan, 0);
  builder.storage.before_read = [](std::size_t, const ReadEvent& event) {
    throw Error("io.read", "cannot read", {.path = event.path});
  };
  pulled.reader.open(loadstone::value_of(plan.targets[0]), plan.decodings);
  Bytes part(40);
  const Error error = error_of([&] { pulled.reader.read(50, 60, part); });
  EXPECT_EQ(error.code(), "io.read");
  EXPECT_EQ(error.where().tensor, "a");
  EXPECT_EQ(error.where().byte_offset, 300u);
}

}  // namespace
}  // namespace loadstone::testing
