// Tests requests to the system for bytes that are not in the page cache.
#include "storage/page_cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <string>

#include "support/files.h"

namespace loadstone::test {

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr uid_t nobody = 65534;

// Creates a file that has no pages in the cache, and disables the system's read-ahead for it.
class ColdFile : public ::testing::Test {
 protected:
  void make(std::uint64_t bytes) {
    path_ = folder_.write("f", some_bytes(bytes));
    descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    ::fsync(descriptor_);
    ::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_DONTNEED);
    ::posix_fadvise(descriptor_, 0, 0, POSIX_FADV_RANDOM);
    struct statfs system {};
    constexpr auto tmpfs = 0x01021994;
    ASSERT_EQ(::fstatfs(descriptor_, &system), 0);
    if (system.f_type == tmpfs) GTEST_SKIP() << "this file system is in memory";
  }
  void TearDown() override {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  void read(std::uint64_t begin, std::uint64_t bytes) const {
    std::string into(bytes, '\0');
    ASSERT_EQ(::pread(descriptor_, into.data(), bytes, static_cast<off_t>(begin)),
              static_cast<ssize_t>(bytes));
  }

  TemporaryFolder folder_;
  std::string path_;
  int descriptor_ = -1;
};

// The page that contains the first byte of each step is already cached by the previous step.
TEST_F(ColdFile, StepsThatBeginInsideAPageAreAskedForWhole) {
  constexpr std::uint64_t begin = 504;  // typical start of the data in a safetensors file
  make(begin + 16 * mib);
  if (IsSkipped()) return;
  for (std::uint64_t at = begin; at < 16 * mib; at += 4 * mib) {
    // The last page may be cached already, so the bound allows for one page less.
    EXPECT_GT(prefetch_missing(descriptor_, at, 4 * mib), 4 * mib - 4096) << at;
    read(at, 4 * mib);
    EXPECT_EQ(prefetch_missing(descriptor_, at, 4 * mib), 0u) << at;
  }
}

// The header of a small shard was read, so only its page is cached.
TEST_F(ColdFile, TheHeadersPageSaysNothingOfTheData) {
  make(mib);
  if (IsSkipped()) return;
  read(0, 4096);
  EXPECT_EQ(prefetch_missing(descriptor_, 504, mib - 504), mib - 504);
}

// For a file of another user, mincore() reports every page as cached.
TEST_F(ColdFile, FilesOfOthersAreAskedForToo) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  make(4 * mib);
  if (IsSkipped()) return;
  ASSERT_EQ(::chmod(path_.c_str(), 0644), 0);
  ASSERT_EQ(::seteuid(nobody), 0);
  const std::uint64_t asked = prefetch_missing(descriptor_, 0, 4 * mib);
  ASSERT_EQ(::seteuid(0), 0);
  EXPECT_EQ(asked, 4 * mib);
}

TEST_F(ColdFile, WhatIsBehindTheEndIsNotAskedFor) {
  make(mib);
  if (IsSkipped()) return;
  EXPECT_EQ(prefetch_missing(descriptor_, 10 * mib, mib), 0u);
  EXPECT_EQ(prefetch_missing(descriptor_, 0, 0), 0u);
}

}  // namespace

}  // namespace loadstone::test
