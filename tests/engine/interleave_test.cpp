#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <thread>

#include "engine/pages.h"

namespace loadstone::test {
namespace {

// Returns the memory policy of the calling thread, or -1 if the system does not report it.
int policy() {
  int mode = -1;
  return ::syscall(SYS_get_mempolicy, &mode, nullptr, 0, nullptr, 0) == 0 ? mode : -1;
}

TEST(Interleave, IsThePolicyOfThatThreadAlone) {
  const int before = policy();
  bool is_done = false;
  int in_thread = -1;
  std::thread([&] {
    is_done = interleave_new_pages();
    in_thread = policy();
  }).join();
  if (!is_done) GTEST_SKIP() << "this system has no policy of memory nodes for processes";
  EXPECT_EQ(in_thread, MPOL_INTERLEAVE);
  EXPECT_EQ(policy(), before);
  EXPECT_NE(before, MPOL_INTERLEAVE);  // control
}

}  // namespace
}  // namespace loadstone::test
