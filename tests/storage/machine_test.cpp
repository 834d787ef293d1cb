// Tests the figures of this machine.
#include "loadstone/machine.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

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

TEST(Machine, TheLimitOfTheAddressSpaceCounts) {
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = rlim_t{1} << 50;  // far more than this machine has
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
  const auto free = available_memory_bytes();
  limit.rlim_cur = 0;  // the process already has more, and allocates nothing until the end
  ::setrlimit(RLIMIT_AS, &limit);
  const auto left = available_memory_bytes();
  ::setrlimit(RLIMIT_AS, &before);
  EXPECT_GT(free, 0u);
  EXPECT_EQ(left, 0u);
}

}  // namespace
}  // namespace loadstone::test
