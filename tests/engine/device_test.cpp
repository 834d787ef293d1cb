// Tests loads to devices with the fake driver, see fake_cuda.h.
#include "loadstone/device.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "device/fake/fake_cuda.h"
#include "engine/limits.h"
#include "loadstone/audit.h"
#include "loadstone/execute.h"
#include "plan/values.h"
#include "support/plan_builder.h"
#include "support/random_plan.h"

namespace loadstone::testing {
namespace {

using ::testing::HasSubstr;

// Owns memory for the targets of a plan. The fake driver registers it as device memory.
class DeviceMemory {
 public:
  explicit DeviceMemory(const Plan& plan) : host_(plan), destinations_(host_.destinations()) {
    fake_cuda_reset();
    for (std::size_t i = 0; i < plan.targets.size(); ++i) {
      const PlannedTarget& target = plan.targets[i];
      if (target.delivery != Delivery::memory || !target.device.starts_with("cuda")) continue;
      Destination& destination = destinations_[i];
      destination.kind = MemoryKind::device;
      const int device = target.device == "cuda:1" ? 1 : 0;
      if (destination.data != nullptr) {
        fake_cuda_register(destination.data, destination.byte_count, device);
      }
      for (const auto& part : destination.parts) {
        fake_cuda_register(part.data(), part.size(), device);
      }
    }
  }

  [[nodiscard]] const std::vector<Destination>& destinations() const { return destinations_; }

 private:
  HostMemory host_;
  std::vector<Destination> destinations_;
};

// Loads with the given version of the driver, by default the newest one.
Report load(const Plan& plan, const DeviceMemory& memory, ExecuteOptions options,
            const char* driver = LOADSTONE_FAKE_CUDA_13) {
  const auto device = open_cuda(driver);
  options.device = device.get();
  return execute(plan, memory.destinations(), options);
}

void expect_clean() {
  EXPECT_STREQ(fake_cuda_violations(), "");
  EXPECT_EQ(fake_cuda_live(), 0);
}

// The least staging memory per thread: two of the smallest windows.
constexpr std::uint64_t ring_bytes_least = 64 << 10;

// Loads a random plan, and returns the number of its targets on a device.
std::size_t load_random_plan(unsigned seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  PlanBuilder builder;
  builder.staging_bytes_max = std::uint64_t{1} << random() % 23;
  Plan plan = random_plan(random, builder);
  plan.threads = static_cast<unsigned>(1 + random() % 4);
  plan.allow_non_finite = true;
  const HostMemory plain(plan);
  execute(plan, plain.destinations(), {.storage = &builder.storage});
  std::size_t count = 0;
  for (PlannedTarget& target : plan.targets) {
    constexpr std::array<const char*, 3> devices = {"cpu", "cuda:0", "cuda:1"};
    target.device = devices[random() % devices.size()];
    if (target.device != "cpu" && target.delivery == Delivery::memory) ++count;
  }
  plan.local_ranks = static_cast<unsigned>(1 + random() % 3 * 4);
  const DeviceMemory memory(plan);
  constexpr std::array<const char*, 3> drivers = {LOADSTONE_FAKE_CUDA_13, LOADSTONE_FAKE_CUDA_12_8,
                                                  LOADSTONE_FAKE_CUDA_12_0};
  const Report report = load(plan, memory,
                             {.threads = static_cast<unsigned>(1 + random() % 4),
                              .chunk_bytes = std::uint64_t{1} << random() % 23,
                              .storage = &builder.storage},
                             drivers[random() % drivers.size()]);
  const ValueSet values = values_of(plan);
  const Limits limits = limits_of(plan, values);
  const std::uint64_t promised = testing::bytes_promised(plan);
  EXPECT_LE(report.staging_bytes_peak, promised);
  EXPECT_LE(fake_cuda_pinned_peak(), promised);
  if (plan.local_ranks > 1) {
    EXPECT_LE(fake_cuda_pinned_peak(),
              std::max(builder.staging_bytes_max / plan.local_ranks, ring_bytes_least));
  }
  EXPECT_LE(promised, std::max(builder.staging_bytes_max, limits.thread_bytes_least()));
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    EXPECT_TRUE(value_of(memory.destinations()[i]) == value_of(plain.destinations()[i]))
        << plan.targets[i].name << " on " << plan.targets[i].device;
    EXPECT_EQ(report.provenance[i].bytes_written, plan.targets[i].byte_count());
  }
  expect_clean();
  return count;
}

TEST(Devices, RandomPlansHaveTheBytesOfTheHost) {
  std::size_t count = 0;
  for (unsigned seed = 0; seed < 400 && !HasFailure(); ++seed) count += load_random_plan(seed);
  EXPECT_GT(count, 400u);
}

const std::vector<Quantization>& quantizations() {
  static const std::vector<Quantization> all = {
      {.encoding = "nf4", .dialect = "bnb-cuda", .nested_offset = {}},
      {.encoding = "fp4", .dialect = {}, .nested = true, .nested_offset = 0.5f},
      {.encoding = "int8", .dialect = {}, .nested_offset = {}},
      {.encoding = "fp8", .dialect = {}, .nested_offset = {}},
      {.encoding = "nvfp4", .dialect = {}, .nested_offset = {}},
      {.encoding = "fp8-block", .dialect = {}, .nested_offset = {}},
      {.encoding = "mxfp8", .dialect = {}, .nested_offset = {}},
  };
  return all;
}

// Returns a plan for a matrix of several windows that the load quantizes.
Plan quantizing_plan(PlanBuilder& builder, const Quantization& quantization) {
  builder.add_shard();
  for (const char* name : {"v", "w"}) {
    PlannedTarget& target = builder.add_plain(name, Dtype::bf16, Dtype::bf16, {320, 256},
                                              pattern(std::size_t{320} * 256 * 2, 5));
    target.quantization = quantization;
  }
  Plan plan = builder.build();
  plan.allow_non_finite = true;
  return plan;
}

TEST(Devices, WhatIsQuantizedOnItsWayHasTheBytesOfTheHost) {
  for (const Quantization& quantization : quantizations()) {
    for (const std::uint64_t staging : {std::uint64_t{64} << 10, std::uint64_t{64} << 20}) {
      PlanBuilder builder;
      Plan plan = quantizing_plan(builder, quantization);
      plan.staging_bytes_max = staging;
      plan.threads = 3;
      const HostMemory plain(plan);
      execute(plan, plain.destinations(), {.storage = &builder.storage});
      for (PlannedTarget& target : plan.targets) target.device = "cuda:0";
      const DeviceMemory memory(plan);
      const Report report = load(plan, memory, {.storage = &builder.storage});
      EXPECT_LE(report.staging_bytes_peak, testing::bytes_promised(plan));
      for (std::size_t i = 0; i < plan.targets.size(); ++i) {
        const auto& found = memory.destinations()[i].parts;
        const auto& expected = plain.destinations()[i].parts;
        ASSERT_EQ(found.size(), expected.size());
        for (std::size_t p = 0; p < found.size(); ++p) {
          EXPECT_TRUE(std::ranges::equal(found[p], expected[p])) << quantization.encoding << p;
        }
      }
      expect_clean();
    }
  }
}

// Returns a plan for one matrix of 32 windows.
Plan matrix_plan(PlanBuilder& builder, const char* device = "cuda:0") {
  builder.add_shard();
  builder.add_plain("w", Dtype::u8, Dtype::u8, {64, 65536}, pattern(std::size_t{64} << 16, 3));
  Plan plan = builder.build();
  plan.targets[0].device = device;
  plan.staging_bytes_max = 512 << 10;
  plan.threads = 1;
  return plan;
}

// Expects that the next window is read between the start of a copy and the wait for that copy.
void expect_overlap(std::size_t copies_least) {
  const std::string order = fake_cuda_order();
  std::size_t overlapped = 0;
  std::size_t copies = 0;
  for (std::size_t at = order.find("copy "); at != std::string::npos;
       at = order.find("copy ", at + 1)) {
    const std::string stream = order.substr(at + 5, order.find('\n', at) - at - 5);
    const std::size_t wait = order.find("wait " + stream + "\n", at);
    ASSERT_NE(wait, std::string::npos);  // the log must contain a wait for each copy
    const std::size_t read = order.find("read\n", at);
    ++copies;
    if (read < wait) ++overlapped;
  }
  EXPECT_GE(copies, copies_least);
  EXPECT_GE(overlapped, copies - 2);  // no window is read after the last two copies
}

TEST(Devices, CopiesGoOnWhileOthersAreRead) {
  PlanBuilder builder;
  const Plan plan = matrix_plan(builder);
  const DeviceMemory memory(plan);
  builder.storage.before_read = [](std::size_t, const testing::ReadEvent&) {
    fake_cuda_note("read");
  };
  const Report report = load(plan, memory, {.storage = &builder.storage});
  EXPECT_EQ(report.bytes_read, std::uint64_t{64} << 16);  // each byte once
  expect_overlap(20);
}

// Values that fill more than half of a slot, but are smaller than a batch.
TEST(Devices, CopiesOfHalvesOfSlotsGoOnToo) {
  for (const std::uint64_t bytes : {140'000, 200'000, 250'000}) {
    SCOPED_TRACE(bytes);
    PlanBuilder builder;
    builder.add_shard();
    for (unsigned i = 0; i < 40; ++i) {
      builder.add_plain("t" + std::to_string(i), Dtype::u8, Dtype::u8, {bytes}, pattern(bytes, i));
    }
    Plan plan = builder.build();
    for (PlannedTarget& target : plan.targets) target.device = "cuda:0";
    plan.threads = 1;
    const DeviceMemory memory(plan);
    builder.storage.before_read = [](std::size_t, const testing::ReadEvent&) {
      fake_cuda_note("read");
    };
    load(plan, memory, {.storage = &builder.storage});
    expect_overlap(40);
  }
}

// Returns a plan of `count` values with 1000 bytes each, which take 1024 bytes each in a slot.
Plan small_values(PlanBuilder& builder, unsigned count, unsigned threads) {
  builder.add_shard();
  for (unsigned i = 0; i < count; ++i) {
    builder.add_plain("t" + std::to_string(i), Dtype::u8, Dtype::u8, {1000}, pattern(1000, i));
  }
  Plan plan = builder.build();
  plan.threads = threads;
  plan.staging_bytes_max = defaults::staging_bytes_max;
  for (PlannedTarget& target : plan.targets) target.device = "cuda:0";
  return plan;
}

TEST(Devices, SmallValuesAreCopiedInBatches) {
  for (const unsigned threads : {1u, 2u, 4u}) {
    for (const char* const driver : {LOADSTONE_FAKE_CUDA_13, LOADSTONE_FAKE_CUDA_12_0}) {
      PlanBuilder builder;
      const unsigned count = 4096;
      const Plan plan = small_values(builder, count, threads);
      const DeviceMemory memory(plan);
      const Report report = load(plan, memory, {.storage = &builder.storage}, driver);
      const int slots = count / (batch_bytes / 1024 - 3) + 1;  // a slot keeps at most 4 KiB free
      const int batches = fake_cuda_calls("cuMemcpyBatchAsync_v2");
      const int copies = fake_cuda_calls("cuMemcpyHtoDAsync_v2");
      if (std::string(driver) == LOADSTONE_FAKE_CUDA_13) {
        // The last slot of a thread may contain a single value, which is copied without a batch.
        EXPECT_LE(copies, static_cast<int>(threads));
        EXPECT_GE(copies + batches, slots);
        EXPECT_LE(copies + batches, slots + static_cast<int>(threads));
      } else {
        EXPECT_EQ(copies, static_cast<int>(count));
      }
      EXPECT_LE(fake_cuda_calls("cuEventSynchronize"), slots + static_cast<int>(threads));
      EXPECT_LE(report.staging_bytes_peak, testing::bytes_promised(plan));
      for (std::size_t i = 0; i < plan.targets.size(); ++i) {
        ASSERT_EQ(value_of(memory.destinations()[i]), expected_value(builder, plan.targets[i]));
      }
      expect_clean();
    }
  }
}

// Slots must be only as large as a few small values need.
TEST(Devices, FewSmallValuesPinLittle) {
  PlanBuilder builder;
  const Plan plan = small_values(builder, 40, 2);
  const DeviceMemory memory(plan);
  load(plan, memory, {.storage = &builder.storage});
  EXPECT_LE(fake_cuda_pinned_peak(), std::uint64_t{12 << 10} * 4);
  EXPECT_LE(fake_cuda_calls("cuMemcpyBatchAsync_v2") + fake_cuda_calls("cuMemcpyHtoDAsync_v2"), 8);
  expect_clean();
}

TEST(Devices, AFailingBatchNamesATensor) {
  for (const char* const driver : {LOADSTONE_FAKE_CUDA_13, LOADSTONE_FAKE_CUDA_12_8}) {
    PlanBuilder builder;
    const Plan plan = small_values(builder, 1000, 1);
    const DeviceMemory memory(plan);
    fake_cuda_fail_copy("cuMemcpyBatchAsync_v2", 1, 10, 700);
    fake_cuda_fail_copy("cuMemcpyBatchAsync", 1, 10, 700);
    const Error error =
        error_of([&] { load(plan, memory, {.storage = &builder.storage}, driver); });
    const bool is_known = std::string(driver) == LOADSTONE_FAKE_CUDA_12_8;
    EXPECT_EQ(error.code(), "device.driver");
    EXPECT_EQ(error.where().field, "cuda:0");
    // A slot is sent when less than 4096 bytes of it are free.
    const std::uint64_t before = batch_bytes / 1024 - 3;
    EXPECT_EQ(error.where().tensor, "t" + std::to_string(before + (is_known ? 10 : 0)));
    EXPECT_EQ(error.message().find("simultaneous") == std::string::npos, is_known) << error.what();
    expect_clean();
  }
}

// A device whose functions throw an int.
class Thrower final : public Device {
 public:
  std::byte* allocate(std::string_view, std::uint64_t bytes) override {
    memory_.resize(bytes);
    return memory_.data();
  }
  void free(std::byte*) noexcept override {}
  void copy(unsigned, std::string_view, std::byte*, std::span<const std::byte>) override {}
  void wait(unsigned) override { throw 7; }
  void read(std::string_view, const std::byte*, std::span<std::byte>) override {}

 private:
  Bytes memory_;
};

TEST(Devices, WhatIsNoExceptionEndsTheLoadToo) {
  PlanBuilder builder;
  const Plan plan = small_values(builder, 40, 2);
  const DeviceMemory memory(plan);
  Thrower device;
  const ExecuteOptions options = {.storage = &builder.storage, .device = &device};
  const Error error = error_of([&] { execute(plan, memory.destinations(), options); });
  EXPECT_EQ(error.code(), "internal");
}

// Values larger than a batch are copied at once. Small values that remain are copied at the end.
TEST(Devices, LargeAndSmallValuesShareARing) {
  PlanBuilder builder;
  builder.add_shard();
  for (unsigned i = 0; i < 40; ++i) {
    const std::uint64_t bytes = i % 2 == 0 ? 300'000 : 500;
    builder.add_plain("t" + std::to_string(i), Dtype::u8, Dtype::u8, {bytes}, pattern(bytes, i));
  }
  Plan plan = builder.build();
  plan.threads = 1;
  for (PlannedTarget& target : plan.targets) {
    target.device = target.name.ends_with("7") ? "cuda:1" : "cuda:0";
  }
  const DeviceMemory memory(plan);
  builder.storage.before_read = [](std::size_t, const testing::ReadEvent&) {
    fake_cuda_note("read");
  };
  load(plan, memory, {.storage = &builder.storage});
  const std::string order = fake_cuda_order();
  for (std::size_t at = order.find("copy "); at != std::string::npos;
       at = order.find("copy ", at + 1)) {
    EXPECT_NE(order.find("wait " + order.substr(at + 5, order.find('\n', at) - at - 5), at),
              std::string::npos);
  }
  EXPECT_LE(fake_cuda_calls("cuEventSynchronize"), 60);
  for (std::size_t i = 0; i < plan.targets.size(); ++i) {
    EXPECT_EQ(value_of(memory.destinations()[i]), expected_value(builder, plan.targets[i]));
  }
  expect_clean();
}

// The processes of one machine share the limit of pinned memory. A single process may use all of
// it.
TEST(Devices, RanksShareWhatMayBePinned) {
  PlanBuilder builder;
  builder.staging_bytes_max = 8 << 20;
  Plan plan = matrix_plan(builder);
  plan.staging_bytes_max = 8 << 20;
  plan.threads = 4;
  std::uint64_t alone = 0;
  for (const unsigned ranks : {1u, 2u, 8u, 64u, 1024u}) {
    plan.local_ranks = ranks;
    const DeviceMemory memory(plan);
    const Report report = load(plan, memory, {.storage = &builder.storage});
    const std::uint64_t pinned = fake_cuda_pinned_peak();
    if (ranks == 1) alone = pinned;
    EXPECT_LE(pinned, std::max(plan.staging_bytes_max / ranks, ring_bytes_least)) << ranks;
    EXPECT_LE(pinned, alone);
    EXPECT_LE(report.staging_bytes_peak, testing::bytes_promised(plan));
    EXPECT_EQ(value_of(memory.destinations()[0]), expected_value(builder, plan.targets[0]));
    expect_clean();
  }
  EXPECT_GT(alone, plan.staging_bytes_max / 4);  // control
}

TEST(Devices, AReceiptHasWhatStandsOnTheDevice) {
  for (const bool is_quantized : {false, true}) {
    PlanBuilder builder;
    Plan plan = is_quantized ? quantizing_plan(builder, quantizations()[4]) : matrix_plan(builder);
    if (!is_quantized) {  // the cast makes the digest differ from the file's
      plan.targets[0].dtype = Dtype::bf16;
    }
    for (PlannedTarget& target : plan.targets) target.device = "cpu";
    const HostMemory plain(plan);
    const Report expected = execute(plan, plain.destinations(),
                                    {.storage = &builder.storage, .receipt = DigestKind::xxh3_128});
    for (PlannedTarget& target : plan.targets) target.device = "cuda:1";
    const DeviceMemory memory(plan);
    const Report report =
        load(plan, memory, {.storage = &builder.storage, .receipt = DigestKind::xxh3_128});
    ASSERT_FALSE(report.receipt->targets.empty());
    ASSERT_EQ(report.receipt->targets.size(), expected.receipt->targets.size());
    for (std::size_t i = 0; i < report.receipt->targets.size(); ++i) {
      EXPECT_EQ(report.receipt->targets[i].digest, expected.receipt->targets[i].digest);
    }
    EXPECT_GT(fake_cuda_calls("cuMemcpyDtoH_v2"), 0);
    expect_clean();
  }
}

// For every failing call, the error must name tensor and device, and nothing may leak or stay in
// flight.
TEST(Devices, AFailingCallEndsTheLoad) {
  for (const char* function :
       {"cuDevicePrimaryCtxRetain", "cuMemHostAlloc", "cuStreamCreate", "cuEventCreate",
        "cuEventRecord", "cuEventSynchronize", "cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2",
        "cuCtxPushCurrent_v2"}) {
    for (const int number : {0, 1, 3, 9}) {
      for (const unsigned threads : {1u, 3u}) {
        PlanBuilder builder;
        Plan plan = matrix_plan(builder, "cuda:1");
        plan.threads = threads;
        const DeviceMemory memory(plan);
        fake_cuda_fail(function, number, 700);
        try {
          const Report report = load(plan, memory, {.storage = &builder.storage});
          EXPECT_LE(fake_cuda_calls(function), number) << function;  // the load makes fewer calls
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), "device.driver") << error.what();
          EXPECT_EQ(error.where().field, "cuda:1") << error.what();
          const bool is_setup = std::string(function).find("Retain") != std::string::npos ||
                                std::string(function).find("Alloc") != std::string::npos;
          if (!is_setup && number > 0) {
            EXPECT_EQ(error.where().tensor, "w") << error.what();
          }
        }
        expect_clean();
      }
    }
  }
}

TEST(Devices, ALostDeviceEndsTheLoad) {
  for (const int number : {0, 5}) {
    PlanBuilder builder;
    Plan plan = matrix_plan(builder);
    plan.threads = 2;
    const DeviceMemory memory(plan);
    fake_cuda_fail("lost", number, 719);
    const Error error = error_of([&] { load(plan, memory, {.storage = &builder.storage}); });
    EXPECT_EQ(error.code(), "device.driver");
    EXPECT_THAT(error.what(), HasSubstr("(719)"));
    EXPECT_STREQ(fake_cuda_violations(), "");
  }
}

TEST(Devices, AFailingReadLeavesNothingUnderWay) {
  for (const std::size_t last : {0u, 1u, 7u, 20u}) {
    PlanBuilder builder;
    Plan plan = matrix_plan(builder);
    plan.threads = 2;
    builder.storage.before_read = [last](std::size_t number, const testing::ReadEvent&) {
      if (number > last) throw Error("io.read", "the disk is gone", {});
    };
    const DeviceMemory memory(plan);
    const Error error = error_of([&] { load(plan, memory, {.storage = &builder.storage}); });
    EXPECT_EQ(error.code(), "io.read");
    EXPECT_EQ(error.where().tensor, "w");
    expect_clean();
  }
}

TEST(Devices, MemoryAndPlanAgree) {
  PlanBuilder builder;
  const Plan plan = matrix_plan(builder, "cpu");
  const HostMemory memory(plan);
  std::vector<Destination> destinations = memory.destinations();
  destinations[0].kind = MemoryKind::device;
  const Error error = error_of([&] { execute(plan, destinations, {.storage = &builder.storage}); });
  EXPECT_EQ(error.code(), "plan.destination");
  EXPECT_EQ(error.where().tensor, "w");
  // A plan for a device can also be loaded to host memory, without a driver.
  PlanBuilder other;
  const Plan on_device = matrix_plan(other, "cuda:0");
  const HostMemory host(on_device);
  fake_cuda_reset();
  execute(on_device, host.destinations(), {.storage = &other.storage});
  EXPECT_EQ(value_of(host.destinations()[0]), expected_value(other, on_device.targets[0]));
  EXPECT_EQ(fake_cuda_calls("cuInit"), 0);
}

}  // namespace
}  // namespace loadstone::testing
