// Values that are quantized on their way have the bytes of encoding them whole, however they are
// cut, moved and read.
#include "execute/quantizer.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "execute/plan_builder.h"
#include "execute/random_plan.h"
#include "loadstone/audit.h"
#include "loadstone/execute.h"

namespace loadstone {
namespace {

using testing::Bytes;
using testing::error_of;
using ::testing::IsEmpty;
using testing::PlanBuilder;
using testing::random_plan;
using ::testing::SizeIs;
using testing::value_of;

bool is_encodable(const PlannedTarget& target, const Quantization& quantization) {
  QuantizeForm form;
  return target.recipe.origin == Origin::checkpoint && target.delivery == Delivery::memory &&
         !prepare_quantization(quantization, target.shape, target.dtype, form);
}

// All parts, one after the other, of numbers that are there as a whole.
std::vector<Bytes> encoded(const Quantization& quantization, const PlannedTarget& target,
                           const Bytes& numbers) {
  QuantizeForm form;
  EXPECT_FALSE(prepare_quantization(quantization, target.shape, target.dtype, form));
  std::vector<Bytes> parts;
  std::vector<std::byte*> memory;
  for (const QuantizedPart& part : form.parts) parts.emplace_back(part.byte_count());
  for (Bytes& part : parts) memory.push_back(part.data());
  Bytes scratch(form.scratch_bytes);
  std::vector<float> amax(form.needs_amax ? form.stack : 0);
  if (form.needs_amax) (void)measure_window(form, 0, form.elements, numbers.data(), amax);
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
  };
  return all;
}

// Returns how many of its targets were quantized.
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
    ++count;
  }
  plan.staging_bytes_max = std::uint64_t{1} << (10 + random() % 14);
  const HostMemory memory(plan);
  const Report report =
      execute(plan, memory.destinations(),
              {.threads = static_cast<unsigned>(1 + random() % 4), .storage = &builder.storage});
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

TEST(Quantizer, WindowsDoNotMatter) {
  std::size_t count = 0;
  for (unsigned seed = 0; seed < 60; ++seed) count += quantize_random_plan(seed);
  EXPECT_GT(count, 60u);
}

// A BF16 matrix of normal numbers, of several windows.
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

TEST(Quantizer, NumbersThatAreNotFiniteAreNamed) {
  for (const Quantization& quantization : quantizations()) {
    Bytes numbers = normal_numbers();
    set_bf16(numbers, 70'000, INFINITY);
    set_bf16(numbers, 50'001, NAN);
    PlanBuilder builder;
    const Plan plan = matrix_plan(builder, quantization, numbers);
    const HostMemory memory(plan);
    const Report report = execute(plan, memory.destinations(), {.storage = &builder.storage});
    ASSERT_THAT(report.findings, SizeIs(1)) << quantization.encoding;
    EXPECT_EQ(report.findings[0].code, "q.nan");
    EXPECT_EQ(report.findings[0].target, "w");
    EXPECT_THAT(report.findings[0].message, ::testing::HasSubstr("element 50001 "));
  }
  PlanBuilder builder;  // the control
  const Plan plan = matrix_plan(builder, quantizations()[0], normal_numbers());
  const HostMemory memory(plan);
  const Report report = execute(plan, memory.destinations(), {.storage = &builder.storage});
  EXPECT_THAT(report.findings, IsEmpty());
}

TEST(Quantizer, EachByteIsReadOnceAndStagingIsBounded) {
  PlanBuilder builder;
  const Plan plan = matrix_plan(builder, quantizations()[0], normal_numbers());
  const HostMemory memory(plan);
  const Report report =
      execute(plan, memory.destinations(), {.threads = 2, .storage = &builder.storage});
  EXPECT_EQ(report.bytes_read, rows * columns * 2);
  EXPECT_LE(report.staging_bytes_peak, plan.staging_bytes_max);
  EXPECT_LT(report.bytes_written, rows * columns);
}

TEST(Quantizer, DestinationsOfPartsAreChecked) {
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

TEST(Quantizer, AFailureNamesTheTensor) {
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

}  // namespace
}  // namespace loadstone
