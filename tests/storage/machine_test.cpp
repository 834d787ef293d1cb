// Tests the figures of this machine.
#include "loadstone/machine.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace loadstone::test {
namespace {

TEST(Machine, ComputedDeviceMapsLeaveAReserve) {
  const auto before = available_memory_bytes();
  const auto mappable = mappable_memory_bytes();
  const auto after = available_memory_bytes();
  ASSERT_TRUE(before && mappable && after);
  // Other programs may have freed memory between two of the calls.
  const std::uint64_t available = std::max(*before, *after) + (std::uint64_t{256} << 20);
  const std::uint64_t reserve = std::max(std::uint64_t{1} << 30, available / 20);
  EXPECT_LE(*mappable, available - std::min(available, reserve));
}

}  // namespace
}  // namespace loadstone::test
