// Tests that values quantized during a load have the same bytes as values quantized whole, for all
// ways of cutting, moving and reading them.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "codec/encode.h"
#include "engine/run.h"
#include "loadstone/audit.h"
#include "loadstone/execute.h"
#include "plan/values.h"
#include "support/plan_builder.h"
#include "support/random_plan.h"

namespace loadstone::testing {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

bool is_encodable(const PlannedTarget& target, const Quantization& quantization) {
  QuantizedLayout form;
  return target.recipe.origin == Origin::checkpoint && target.delivery == Delivery::memory &&
         !prepare_quantization(quantization, target.shape, target.dtype, form);
}

// Returns all components in sequence, encoded from complete values. `others` share the scale.
std::vector<Bytes> encoded(const Quantization& quantization, const PlannedTarget& target,
                           const Bytes& numbers, const std::vector<Bytes>& others = {}) {
  QuantizedLayout form;
  EXPECT_FALSE(prepare_quantization(quantization, target.shape, target.dtype, form));
  std::vector<Bytes> parts;
  std::vector<std::byte*> memory;
  for (const QuantizedPart& part : form.parts) parts.emplace_back(part.byte_count());
  for (Bytes& part : parts) memory.push_back(part.data());
  Bytes scratch(form.scratch_bytes);
  std::vector<float> amax(form.needs_amax ? form.stack : 0);
  if (form.needs_amax) (void)measure_window(form, 0, form.elements, numbers.data(), amax);
  for (const Bytes& other : others) {
    (void)measure_window(form, 0, form.elements, other.data(), amax);
  }
  (void)quantize_window(form, 0, form.elements, numbers.data(), memory, amax, scratch.data());
  finish_quantized(form, memory, amax, scratch.data());
  return parts;
}

const std::vector<Quantization>& quantizations() {
  static const std::vector<Quantization> all = {
      {.encoding = "nf4", .dialect = {}, .nested_offset = {}},
      {.encoding = "fp4", .dialect = "bnb-cuda", .block_size = 32, .nested_offset = {}},
      {.encoding = "nf4", .dialect = {}, .block_size = 128, .nested = true, .nested_offset = {}},
      {.encoding = "fp4", .dialect = {}, .nested = true, .nested_offset = 0.5f},
      {.encoding = "int8", .dialect = {}, .nested_offset = {}},
      {.encoding = "fp8", .dialect = {}, .nested_offset = {}},
      {.encoding = "fp8", .dialect = "modelopt-compat", .nested_offset = {}},
      {.encoding = "nvfp4", .dialect = {}, .nested_offset = {}},
      {.encoding = "fp8-channel", .dialect = {}, .nested_offset = {}},
      {.encoding = "fp8-block", .dialect = "modelopt-compat", .nested_offset = {}},
      {.encoding = "int8-channel", .dialect = {}, .nested_offset = {}},
      {.encoding = "mxfp8", .dialect = {}, .nested_offset = {}},
  };
  return all;
}

// Loads a random plan and returns the number of its quantized targets.
std::size_t quantize_random_plan(unsigned seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  PlanBuilder builder;
  Plan plan = random_plan(random, builder);
  const HostMemory plain(plan);
  execute(plan, plain.destinations(), {.storage = &builder.storage});
  std::size_t count = 0;
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const Quantization& chosen = quantizations()[random() % quantizations().size()];
    const bool has_tie = std::ranges::any_of(plan.targets, [&](const PlannedTarget& other) {
      return other.recipe.tie_of == plan.targets[i].name;
    });
    if (has_tie || !is_encodable(plan.targets[i], chosen)) continue;
    plan.targets[i].quantization = chosen;
    const bool has_scale_of_tensor = chosen.encoding == "fp8" || chosen.encoding == "nvfp4";
    plan.targets[i].quantization->exact_first = !has_scale_of_tensor && i % 2 == 0;
    ++count;
  }
  plan.staging_bytes_max = std::uint64_t{1} << (10 + random() % 14);
  plan.threads = static_cast<unsigned>(1 + random() % 4);
  plan.allow_non_finite = true;
  const HostMemory memory(plan);
  const ValueSet values = values_of(plan);
  const Limits limits = limits_of(plan, values);
  const std::uint64_t promised = testing::bytes_promised(plan);
  for (const unsigned threads : {1, 2, 3, 4, 16}) {
    EXPECT_LE(limits.bytes_held(limits.load_budget(promise_of(plan), threads)), promised)
        << threads;
  }
  const Report report =
      execute(plan, memory.destinations(),
              {.threads = static_cast<unsigned>(1 + random() % 4), .storage = &builder.storage});
  EXPECT_LE(report.staging_bytes_peak, promised);
  audit(plan, report).require_real();
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    const PlannedTarget& target = plan.targets[i];
    const Destination& found = memory.destinations()[i];
    if (!target.quantization) {
      if (target.delivery != Delivery::memory) continue;
      EXPECT_TRUE(value_of(found) == value_of(plain.destinations()[i])) << target.name;
      continue;
    }
    const auto expected = encoded(*target.quantization, target, value_of(plain.destinations()[i]));
    EXPECT_THAT(found.parts, SizeIs(expected.size()));
    for (std::size_t p = 0; p < std::min(expected.size(), found.parts.size()); ++p) {
      EXPECT_TRUE(std::ranges::equal(found.parts[p], expected[p]))
          << target.name << " part " << p << " as " << target.quantization->encoding;
    }
    EXPECT_EQ(report.provenance[i].encoding, target.quantization->encoding);
    EXPECT_EQ(report.provenance[i].bytes_written, target.byte_count());
  }
  return count;
}

TEST(Windows, WindowsDoNotMatter) {
  std::size_t count = 0;
  for (unsigned seed = 0; seed < 1000 && !HasFailure(); ++seed) count += quantize_random_plan(seed);
  EXPECT_GT(count, 250u);
}

// Dimensions of a BF16 matrix that consists of several windows.
constexpr std::uint64_t rows = 300;
constexpr std::uint64_t columns = 257;

void set_bf16(Bytes& bytes, std::size_t index, float number) {
  std::uint32_t word = 0;
  std::memcpy(&word, &number, sizeof(word));
  const auto half = static_cast<std::uint16_t>(word >> 16);
  std::memcpy(bytes.data() + 2 * index, &half, sizeof(half));
}

Bytes normal_numbers() {
  Bytes bytes(rows * columns * 2);
  std::mt19937_64 random(7);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < rows * columns; ++i) set_bf16(bytes, i, normal(random));
  return bytes;
}

Plan matrix_plan(PlanBuilder& builder, const Quantization& quantization, Bytes numbers) {
  builder.add_shard();
  PlannedTarget& target =
      builder.add_plain("w", Dtype::bf16, Dtype::bf16, {rows, columns}, std::move(numbers));
  target.quantization = quantization;
  Plan plan = builder.build();
  plan.staging_bytes_max = 64 << 10;
  return plan;
}

TEST(Windows, NumbersThatAreNotFiniteAreNamed) {
  for (const Quantization& quantization : quantizations()) {
    Bytes numbers = normal_numbers();
    set_bf16(numbers, 70'000, INFINITY);
    set_bf16(numbers, 50'001, NAN);
    PlanBuilder builder;
    Plan plan = matrix_plan(builder, quantization, numbers);
    const HostMemory memory(plan);
    const Error error =
        error_of([&] { execute(plan, memory.destinations(), {.storage = &builder.storage}); });
    EXPECT_EQ(error.code(), "q.nan");
    EXPECT_EQ(error.where().tensor, "w");
    plan.allow_non_finite = true;
    const Report report = execute(plan, memory.destinations(), {.storage = &builder.storage});
    ASSERT_THAT(report.findings, SizeIs(1)) << quantization.encoding;
    EXPECT_EQ(report.findings[0].code, "q.nan");
    EXPECT_EQ(report.findings[0].target, "w");
    EXPECT_THAT(report.findings[0].message, ::testing::HasSubstr("element 50001 "));
  }
  PlanBuilder builder;  // control
  const Plan plan = matrix_plan(builder, quantizations()[0], normal_numbers());
  const HostMemory memory(plan);
  const Report report = execute(plan, memory.destinations(), {.storage = &builder.storage});
  EXPECT_THAT(report.findings, IsEmpty());
}

TEST(Windows, EachByteIsReadOnceAndStagingIsBounded) {
  PlanBuilder builder;
  const Plan plan = matrix_plan(builder, quantizations()[0], normal_numbers());
  const HostMemory memory(plan);
  const Report report =
      execute(plan, memory.destinations(), {.threads = 2, .storage = &builder.storage});
  EXPECT_EQ(report.bytes_read, rows * columns * 2);
  EXPECT_LE(report.staging_bytes_peak, testing::bytes_promised(plan));
  EXPECT_LT(report.bytes_written, rows * columns);
}

// BF16 matrices. The values of each are three times as large as those of the previous one. All but
// the last matrix share a scale.
struct Partners {
  PlanBuilder builder;
  std::vector<Bytes> numbers;
  Plan plan;

  Partners(const std::string& encoding, std::uint64_t staging) {
    builder.add_shard();
    for (std::size_t i = 0; i < 4; ++i) {
      Bytes bytes(rows * columns * 2);
      std::mt19937_64 random(i);
      std::normal_distribution<float> normal(0.0f, std::pow(3.0f, static_cast<float>(i)));
      for (std::size_t k = 0; k < rows * columns; ++k) set_bf16(bytes, k, normal(random));
      numbers.push_back(bytes);
      const std::string name = "w" + std::to_string(i);
      PlannedTarget& target =
          builder.add_plain(name, Dtype::bf16, Dtype::bf16, {rows, columns}, std::move(bytes));
      target.quantization = {.encoding = encoding,
                             .dialect = {},
                             .nested_offset = {},
                             .group = i < 3 ? "together" : ""};
    }
    plan = builder.build();
    plan.staging_bytes_max = staging;
  }
};

TEST(Windows, AGroupSharesItsScale) {
  for (const std::string encoding : {"fp8", "nvfp4"}) {
    for (const std::uint64_t staging : {std::uint64_t{32} << 10, std::uint64_t{64} << 20}) {
      for (const unsigned threads : {1u, 3u}) {
        Partners partners(encoding, staging);
        partners.plan.threads = threads;
        const HostMemory memory(partners.plan);
        const Report report = execute(partners.plan, memory.destinations(),
                                      {.threads = threads, .storage = &partners.builder.storage});
        const bool is_kept = staging > 100 * rows * columns;
        EXPECT_EQ(report.bytes_read, rows * columns * 2 * 4 * (is_kept ? 1 : 2));
        EXPECT_LE(report.staging_bytes_peak, testing::bytes_promised(partners.plan));
        for (std::size_t i = 0; i < 4; ++i) {
          const PlannedTarget& target = partners.plan.targets[i];
          const std::vector<Bytes> others(partners.numbers.begin(), partners.numbers.begin() + 3);
          const auto expected = encoded(*target.quantization, target, partners.numbers[i],
                                        i < 3 ? others : std::vector<Bytes>());
          const auto& found = memory.destinations()[i].parts;
          ASSERT_THAT(found, SizeIs(expected.size()));
          for (std::size_t p = 0; p < found.size(); ++p) {
            EXPECT_TRUE(std::ranges::equal(found[p], expected[p])) << encoding << i << " " << p;
          }
        }
        const auto scale = [&](std::size_t i) {
          const auto part = memory.destinations()[i].parts.back();
          return Bytes(part.begin(), part.end());
        };
        EXPECT_EQ(scale(0), scale(2));
        EXPECT_NE(scale(0), scale(3));  // control
      }
    }
  }
}

TEST(Windows, AFailureWhileOthersMeasureEndsAll) {
  for (const std::size_t last : {1u, 9u, 20u, 35u}) {
    Partners partners("fp8", 32 << 10);
    partners.builder.storage.before_read = [last](std::size_t number, const testing::ReadEvent&) {
      if (number > last) throw Error("io.read", "the disk is gone", {});
    };
    const HostMemory memory(partners.plan);
    const Error error = error_of([&] {
      execute(partners.plan, memory.destinations(),
              {.threads = 3, .storage = &partners.builder.storage});
    });
    EXPECT_EQ(error.code(), "io.read");
  }
}

// Even if a matrix has no values, its scales must be zeros and not uninitialised memory.
TEST(Windows, NoPartOfAnEmptyValueIsLeftAsItWas) {
  for (const Quantization& quantization : quantizations()) {
    QuantizedLayout form;
    if (prepare_quantization(quantization, {64, 0}, Dtype::bf16, form)) continue;
    PlanBuilder builder;
    builder.add_shard();
    builder.add_plain("w", Dtype::bf16, Dtype::bf16, {64, 0}, {}).quantization = quantization;
    const Plan plan = builder.build();
    const HostMemory memory(plan);
    for (const auto& part : memory.destinations()[0].parts) {
      std::ranges::fill(part, std::byte{0xab});
    }
    execute(plan, memory.destinations(), {.storage = &builder.storage});
    for (const auto& part : memory.destinations()[0].parts) {
      EXPECT_EQ(std::ranges::count(part, std::byte{0xab}), 0) << quantization.encoding;
    }
  }
}

TEST(Windows, AGroupIsOfOneHeight) {
  PlanBuilder builder;
  builder.add_shard();
  for (const Shape& shape : {Shape{2, 8, 16}, Shape{16, 16}}) {
    PlannedTarget& target = builder.add_plain("w" + std::to_string(shape.rank()), Dtype::bf16,
                                              Dtype::bf16, shape, Bytes(512));
    target.quantization = {.encoding = "nvfp4", .dialect = {}, .nested_offset = {}, .group = "g"};
  }
  const Plan plan = builder.build();
  const HostMemory memory(plan);
  const Error error =
      error_of([&] { execute(plan, memory.destinations(), {.storage = &builder.storage}); });
  EXPECT_EQ(error.code(), "plan.quantize");
}

TEST(Windows, DestinationsOfPartsAreChecked) {
  PlanBuilder builder;
  const Plan plan = matrix_plan(builder, quantizations()[0], normal_numbers());
  const HostMemory memory(plan);
  std::vector<Destination> destinations = memory.destinations();
  const auto code = [&] {
    return error_of([&] { execute(plan, destinations, {.storage = &builder.storage}); }).code();
  };
  destinations[0].parts[1] = destinations[0].parts[1].first(4);
  EXPECT_EQ(code(), "plan.destination");
  destinations[0].parts.pop_back();
  EXPECT_EQ(code(), "plan.destination");
  destinations[0] = memory.destinations()[0];
  destinations[0].data = destinations[0].parts[0].data();
  EXPECT_EQ(code(), "plan.destination");
}

TEST(Windows, AFailureNamesTheTensor) {
  PlanBuilder builder;
  const Plan plan = matrix_plan(builder, quantizations()[4], normal_numbers());
  builder.storage.before_read = [](std::size_t number, const testing::ReadEvent&) {
    if (number > 1) throw Error("io.read", "the disk is gone", {});
  };
  const HostMemory memory(plan);
  const Error error =
      error_of([&] { execute(plan, memory.destinations(), {.storage = &builder.storage}); });
  EXPECT_EQ(error.code(), "io.read");
  EXPECT_EQ(error.where().tensor, "w");
}

// A sink that counts the windows of one value in memory.
struct CountingSink final : ValueSink {
  Bytes bytes;
  std::atomic<std::size_t> windows = 0;

  explicit CountingSink(std::uint64_t byte_count) : bytes(byte_count, std::byte{1}) {}
  std::byte* place(std::uint32_t, std::size_t) override { return bytes.data(); }
  void write(std::uint32_t, std::size_t, std::uint64_t, std::span<std::byte>) override {}
  void made(std::uint32_t, std::size_t, std::span<const std::byte>) override { ++windows; }
  void finish(std::uint32_t) override {}
};

// A load that only fills memory must not allocate windows.
TEST(Windows, FillsAndConstantsAreWrittenInLargeSteps) {
  PlanBuilder builder;
  (void)matrix_plan(builder, quantizations()[0], normal_numbers());
  const Plan plan = builder.build();
  const Shape shape{2 << 20, 2};
  const Bytes constant(shape.numel().value(), std::byte{7});
  const Fill fill_nines = [](Dtype, std::span<std::byte> to) noexcept {
    std::ranges::fill(to, std::byte{9});
  };
  const std::pair<Value, std::byte> cases[] = {{{}, std::byte{0}},
                                               {{.constant = &constant}, std::byte{7}},
                                               {{.fill = fill_nines}, std::byte{9}}};
  for (auto [value, byte] : cases) {
    value.name = "v";
    value.shape = &shape;
    value.dtype = Dtype::u8;
    value.has_place = true;
    const Bytes expected(constant.size(), byte);
    ValueSet values = {.catalog = *plan.catalog, .list = {value}};
    const Limits limits(values);
    EXPECT_EQ(limits.bytes_promised({}), 0u);
    const Budget budget = limits.load_budget({}, 1);
    GroupList groups;
    append_groups(values, std::vector<std::uint32_t>{0}, groups);
    CountingSink sink(expected.size());
    MemoryCount memory;
    (void)run({.values = values,
               .shards = {},
               .budget = budget,
               .groups = groups,
               .sink = sink,
               .memory = memory},
              {1, 1, 1});
    EXPECT_EQ(sink.bytes, expected);
    EXPECT_LE(sink.windows, 4u);
    EXPECT_EQ(memory.bytes_peak(), 0u);
  }
}

}  // namespace
}  // namespace loadstone::testing
