// Tests the figures of this machine.
#include "loadstone/machine.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

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
  constexpr std::uint64_t room = 64 << 20;
  std::uint64_t pages = 0;
  ASSERT_TRUE(std::ifstream("/proc/self/statm") >> pages);
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) + room;
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
  const auto left = available_memory_bytes();
  ::setrlimit(RLIMIT_AS, &before);
  ASSERT_TRUE(left);
  EXPECT_LE(*left, room);
}

}  // namespace
}  // namespace loadstone::test
