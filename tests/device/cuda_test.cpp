// Copies by CUDA's driver, against one without a GPU.
#include <gmock/gmock.h>

#include <array>
#include <cstring>
#include <vector>

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

TEST_F(Cuda, CopiesArriveWhenTheirLaneIsWaitedFor) {
  {
    const auto device = open_cuda(LOADSTONE_FAKE_CUDA_13);
    EXPECT_EQ(fake_cuda_calls("cuDevicePrimaryCtxRetain"), 0);  // nothing is touched yet
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
    device->wait(17);  // never used
    EXPECT_EQ(first_[63], std::byte{7});
    std::array<std::byte, 4> back = {};
    device->read("cuda:1", second_.data() + 60, back);
    EXPECT_EQ(back[3], std::byte{7});
    device->free(pinned);
  }
  EXPECT_STREQ(fake_cuda_violations(), "");
  EXPECT_EQ(fake_cuda_live(), 0);
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
  device->copy(1, "cuda:0", first_.data(), {pinned, 64});  // the next try has a stream
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

// Controls: the fake sees what it is there to see.
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

}  // namespace
}  // namespace loadstone
