// Tests copies through CUDA's driver API with a fake driver.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "device/cuda_driver.h"
#include "device/fake/fake_cuda.h"
#include "loadstone/device.h"
#include "loadstone/error.h"
#include "support/errors.h"

namespace loadstone {
namespace {

using test::error_of;
using ::testing::HasSubstr;

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_cuda_reset();
    fake_cuda_register(first_.data(), first_.size(), 0);
    fake_cuda_register(second_.data(), second_.size(), 1);
  }

  std::array<std::byte, 64> first_ = {};
  std::array<std::byte, 64> second_ = {};
};

TEST_F(Cuda, OnlyTheDriversDevicesArePresent) {
  EXPECT_TRUE(has_cuda("cuda", LOADSTONE_FAKE_CUDA_13));
  EXPECT_TRUE(has_cuda("cuda:1", LOADSTONE_FAKE_CUDA_13));
  EXPECT_FALSE(has_cuda("cuda:99", LOADSTONE_FAKE_CUDA_13));
  EXPECT_FALSE(has_cuda("xpu", LOADSTONE_FAKE_CUDA_13));
  EXPECT_FALSE(has_cuda("cuda", "libno_such_library.so"));
}

TEST_F(Cuda, CopiesArriveWhenTheirLaneIsWaitedFor) {
  {
    const auto device = open_cuda(LOADSTONE_FAKE_CUDA_13);
    EXPECT_EQ(fake_cuda_calls("cuDevicePrimaryCtxRetain"), 0);  // no context is created yet
    std::byte* const pinned = device->allocate("cuda:1", 128);
    EXPECT_EQ(fake_cuda_calls("cuDevicePrimaryCtxRetain"), 1);
    std::memset(pinned, 7, 128);
    device->copy(0, "cuda", first_.data(), {pinned, 32});
    device->copy(0, "cuda:1", second_.data(), {pinned, 64});
    device->copy(3, "cuda:0", first_.data() + 32, {pinned + 32, 32});
    EXPECT_EQ(first_[0], std::byte{0});
    device->wait(0);
    EXPECT_EQ(first_[31], std::byte{7});
    EXPECT_EQ(second_[63], std::byte{7});
    EXPECT_EQ(first_[32], std::byte{0});
    device->wait(3);
    device->wait(17);  // a stream without copies
    EXPECT_EQ(first_[63], std::byte{7});
    std::array<std::byte, 4> back = {};
    device->read("cuda:1", second_.data() + 60, back);
    EXPECT_EQ(back[3], std::byte{7});
    device->free(pinned);
  }
  EXPECT_STREQ(fake_cuda_violations(), "");
  EXPECT_EQ(fake_cuda_live(), 0);
}

// Returns copies of 8 bytes each to the first device's memory, in contiguous pairs.
std::vector<DeviceCopy> pairs(std::byte* to, const std::byte* from) {
  std::vector<DeviceCopy> copies;
  for (const std::size_t at : {0u, 8u, 24u, 32u, 48u, 56u})
    copies.push_back({to + at, {from + at, 8}});
  return copies;
}

constexpr std::array<const char*, 3> versions = {LOADSTONE_FAKE_CUDA_13, LOADSTONE_FAKE_CUDA_12_8,
                                                 LOADSTONE_FAKE_CUDA_12_0};

TEST_F(Cuda, ManyCopiesAreOneCallWhereTheDriverHasIt) {
  for (const std::size_t version : {0u, 1u, 2u}) {
    for (const bool is_supported : {true, false}) {
      SetUp();
      first_ = {};
      if (!is_supported) fake_cuda_fail("cuMemcpyBatchAsync_v2", 0, 801);
      if (!is_supported) fake_cuda_fail("cuMemcpyBatchAsync", 0, 801);
      const auto device = open_cuda(versions[version]);
      std::byte* const pinned = device->allocate("cuda:0", 64);
      std::memset(pinned, 7, 64);
      std::size_t failed = 6;
      device->copy_all(0, "cuda:0", pairs(first_.data(), pinned), failed);
      EXPECT_EQ(fake_cuda_calls("cuMemcpyBatchAsync_v2"), version == 0 ? 1 : 0);
      EXPECT_EQ(fake_cuda_calls("cuMemcpyBatchAsync"), version == 1 ? 1 : 0);
      EXPECT_EQ(fake_cuda_calls("cuMemcpyHtoDAsync_v2"), version == 2 || !is_supported ? 3 : 0);
      EXPECT_EQ(first_[0], std::byte{0});
      device->wait(0);
      for (std::size_t i = 0; i < first_.size(); ++i) {
        const bool is_between = (i >= 16 && i < 24) || (i >= 40 && i < 48);
        EXPECT_EQ(first_[i], std::byte(is_between ? 0 : 7)) << i;
      }
      device->free(pinned);
      EXPECT_STREQ(fake_cuda_violations(), "");
    }
  }
}

// A copy must not span two allocations. The fake driver would record it as a violation.
TEST_F(Cuda, NoCopyGoesFromOneAllocationToTheNext) {
  fake_cuda_reset();
  fake_cuda_register(first_.data(), 16, 0);
  fake_cuda_register(first_.data() + 16, 48, 0);
  const auto device = open_cuda(LOADSTONE_FAKE_CUDA_12_0);
  std::byte* const pinned = device->allocate("cuda:0", 64);
  std::memset(pinned, 7, 64);
  std::vector<DeviceCopy> copies;
  for (std::size_t at = 0; at < 64; at += 8)
    copies.push_back({first_.data() + at, {pinned + at, 8}});
  std::size_t failed = 8;
  device->copy_all(0, "cuda:0", copies, failed);
  device->wait(0);
  EXPECT_EQ(fake_cuda_calls("cuMemcpyHtoDAsync_v2"), 2);
  EXPECT_EQ(std::ranges::count(first_, std::byte{7}), 64);
  // If the driver cannot report allocations, copies are not joined.
  fake_cuda_fail("cuMemGetAddressRange_v2", fake_cuda_calls("cuMemGetAddressRange_v2"), 1);
  device->copy_all(0, "cuda:0", std::span(copies).first(2), failed);
  device->wait(0);
  EXPECT_EQ(fake_cuda_calls("cuMemcpyHtoDAsync_v2"), 4);
  EXPECT_STREQ(fake_cuda_violations(), "");
  EXPECT_EQ(error_of([&] {
              device->copy(0, "cuda:0", first_.data(), {pinned, 64});
            })
                .value()
                .code(),
            "device.driver");
  device->free(pinned);
}

TEST_F(Cuda, TheCopyThatFailsIsKnownWhereTheDriverSaysIt) {
  constexpr std::array<std::size_t, 3> expected = {6, 4, 4};  // reported index of the failed copy
  for (const std::size_t version : {0u, 1u, 2u}) {
    SetUp();
    fake_cuda_fail_copy("cuMemcpyBatchAsync_v2", 0, 2, 700);
    fake_cuda_fail_copy("cuMemcpyBatchAsync", 0, 2, 700);
    fake_cuda_fail("cuMemcpyHtoDAsync_v2", 2, 700);
    const auto device = open_cuda(versions[version]);
    std::byte* const pinned = device->allocate("cuda:0", 64);
    std::size_t failed = 6;
    const auto error = error_of([&] {
                         device->copy_all(0, "cuda:0", pairs(first_.data(), pinned), failed);
                       }).value();
    EXPECT_EQ(error.code(), "device.driver");
    EXPECT_EQ(failed, expected[version]);
    device->wait(0);  // the copies before the failed one had started
    device->free(pinned);
    EXPECT_STREQ(fake_cuda_violations(), "");
  }
}

// A device that does not implement copy_all().
class OneByOne final : public Device {
 public:
  std::byte* allocate(std::string_view, std::uint64_t) override { return nullptr; }
  void free(std::byte*) noexcept override {}
  void copy(unsigned, std::string_view, std::byte* to, std::span<const std::byte> from) override {
    if (from.empty()) throw Error("device.driver", "no copy");
    std::memcpy(to, from.data(), from.size());
  }
  void wait(unsigned) override {}
  void read(std::string_view, const std::byte*, std::span<std::byte>) override {}
};

TEST(Device, CopiesOneByOneWithoutAnOverride) {
  OneByOne device;
  std::array<std::byte, 64> to = {};
  const std::array<std::byte, 64> from = {std::byte{1}, std::byte{2}};
  std::vector<DeviceCopy> copies = pairs(to.data(), from.data());
  std::size_t failed = copies.size();
  device.copy_all(0, "xpu:0", copies, failed);
  EXPECT_EQ(to, from);
  copies[3].from = {};
  EXPECT_TRUE(error_of([&] { device.copy_all(0, "xpu:0", copies, failed); }));
  EXPECT_EQ(failed, 3u);
}

TEST_F(Cuda, WhatFailsIsNamed) {
  const auto device = open_cuda(LOADSTONE_FAKE_CUDA_13);
  std::byte* const pinned = device->allocate("cuda:0", 64);
  fake_cuda_fail("cuMemcpyHtoDAsync_v2", 0, 700);
  const auto copy = error_of([&] {
                      device->copy(0, "cuda:0", first_.data(), {pinned, 64});
                    }).value();
  EXPECT_EQ(copy.code(), "device.driver");
  EXPECT_EQ(copy.where().field, "cuda:0");
  EXPECT_THAT(copy.what(), HasSubstr("cuMemcpyHtoDAsync failed"));
  EXPECT_THAT(copy.what(), HasSubstr("CUDA_ERROR_ILLEGAL_ADDRESS (700)"));
  fake_cuda_fail("cuStreamCreate", 1, 2);
  EXPECT_EQ(error_of([&] {
              device->copy(1, "cuda:0", first_.data(), {pinned, 64});
            })
                .value()
                .code(),
            "memory.device");
  device->copy(1, "cuda:0", first_.data(), {pinned, 64});  // a later copy creates the stream
  device->wait(1);
  device->free(pinned);
  for (const char* name : {"cuda:2", "cuda:x", "cuda:", "cuda:1 ", "xpu:0", "cpu", ""}) {
    EXPECT_EQ(error_of([&] {
                device->copy(0, name, first_.data(), {pinned, 1});
              })
                  .value()
                  .code(),
              "device.driver")
        << name;
  }
  fake_cuda_fail("cuMemHostAlloc", 1, 2);
  EXPECT_EQ(error_of([&] { static_cast<void>(device->allocate("cuda:0", 64)); }).value().code(),
            "memory.host");
  EXPECT_STREQ(fake_cuda_violations(), "");
}

TEST_F(Cuda, ALibraryThatIsNoDriverIsRefused) {
  const auto absent =
      error_of([] { static_cast<void>(open_cuda("no_such_library.so.1")); }).value();
  EXPECT_EQ(absent.code(), "device.driver");
  EXPECT_THAT(absent.what(), HasSubstr("no_such_library.so.1"));
  const auto other = error_of([] { static_cast<void>(open_cuda("libm.so.6")); }).value();
  EXPECT_EQ(other.code(), "device.driver");
  EXPECT_THAT(other.what(), HasSubstr("cuInit"));
  fake_cuda_fail("cuDeviceGet", 0, 101);
  EXPECT_THAT(error_of([] { static_cast<void>(open_cuda(LOADSTONE_FAKE_CUDA_13)); }).value().what(),
              HasSubstr("CUDA_ERROR_INVALID_DEVICE"));
}

// Controls: the fake driver detects misuse that a real driver punishes.
TEST_F(Cuda, TheFakeSeesWhatADriverWouldPunish) {
  const auto device = open_cuda(LOADSTONE_FAKE_CUDA_13);
  std::byte* const pinned = device->allocate("cuda:0", 64);
  const auto breaks = [&](const char* what, const auto& call) {
    EXPECT_EQ(error_of(call).value().code(), "device.driver") << what;
    EXPECT_THAT(fake_cuda_violations(), HasSubstr(what));
  };
  breaks("outside of the device's memory", [&] {
    device->copy(0, "cuda:1", first_.data(), {pinned, 64});
  });
  breaks("pageable memory", [&] {
    device->copy(0, "cuda:0", first_.data(), {second_.data(), 64});
  });
  EXPECT_EQ(fake_cuda_live(), 1 + 2 + 4);  // memory, contexts, streams and events
  device->copy(0, "cuda:0", first_.data(), {pinned, 64});
  device->free(pinned);
  EXPECT_THAT(fake_cuda_violations(), HasSubstr("freed under a copy"));
  device->wait(0);
  device->free(pinned);
}

TEST_F(Cuda, TheFakeSeesWrongBatches) {
  const auto device = open_cuda(LOADSTONE_FAKE_CUDA_13);  // retains a context
  std::byte* const pinned = device->allocate("cuda:0", 64);
  const CudaDriver driver(LOADSTONE_FAKE_CUDA_13);
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  ASSERT_EQ(driver.cuDevicePrimaryCtxRetain(&context, 0), cuda::success);
  ASSERT_EQ(driver.cuCtxPushCurrent_v2(context), cuda::success);
  ASSERT_EQ(driver.cuStreamCreate(&stream, cuda::stream_non_blocking), cuda::success);
  struct Arguments {
    std::size_t count = 2;
    std::vector<CUmemcpyAttributes> attributes{{.srcAccessOrder = cuda::source_in_stream_order}};
    std::vector<std::size_t> first{0};
    CUstream stream = nullptr;
    std::size_t bytes = 8;
  };
  const auto batch = [&](Arguments each) {
    std::array<CUdeviceptr, 2> to = {reinterpret_cast<CUdeviceptr>(first_.data()),        // NOLINT
                                     reinterpret_cast<CUdeviceptr>(first_.data() + 32)};  // NOLINT
    std::array<CUdeviceptr, 2> from = {reinterpret_cast<CUdeviceptr>(pinned),             // NOLINT
                                       reinterpret_cast<CUdeviceptr>(pinned)};            // NOLINT
    std::array<std::size_t, 2> bytes = {8, each.bytes};
    return driver.cuMemcpyBatchAsync_v2(to.data(), from.data(), bytes.data(), each.count,
                                        each.attributes.data(), each.first.data(),
                                        each.attributes.size(), each.stream);
  };
  EXPECT_EQ(batch({.stream = stream}), cuda::success);
  EXPECT_STREQ(fake_cuda_violations(), "");
  const CUmemcpyAttributes good = {.srcAccessOrder = cuda::source_in_stream_order};
  const std::vector<std::pair<const char*, Arguments>> wrong = {
      {"legacy stream", {}},
      {"batch of nothing", {.count = 0, .stream = stream}},
      {"that are missing", {.attributes = {}, .stream = stream}},
      {"without an order", {.attributes = {{}}, .stream = stream}},
      {"unknown flags", {.attributes = {{.srcAccessOrder = 1, .flags = 2}}, .stream = stream}},
      {"ascend from 0", {.first = {1}, .stream = stream}},
      {"ascend from 0", {.attributes = {good, good}, .first = {0, 0}, .stream = stream}},
      {"behind its end", {.attributes = {good, good}, .first = {0, 2}, .stream = stream}},
      {"outside of the device's memory", {.stream = stream, .bytes = 33}},
      {"copy of nothing", {.stream = stream, .bytes = 0}},
  };
  for (const auto& [what, arguments] : wrong) {
    EXPECT_NE(batch(arguments), cuda::success) << what;
    EXPECT_THAT(fake_cuda_violations(), HasSubstr(what));
  }
}

}  // namespace
}  // namespace loadstone
