#include "storage/network_file_system.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "loadstone/catalog.h"
#include "storage/descriptor_pool.h"
#include "support/files.h"

static bool all_are_on_nfs = false;

// Replaces the function of the C library, because tests cannot mount a network file system.
extern "C" int fstatfs(int descriptor, struct statfs* system) noexcept {
  const long result = ::syscall(SYS_fstatfs, descriptor, system);
  if (result == 0 && all_are_on_nfs) system->f_type = 0x6969;
  return static_cast<int>(result);
}

namespace loadstone::test {

namespace {

TEST(NetworkFileSystem, ByItsNumber) {
  for (const std::uint32_t type : {0x6969u, 0xff534d42u, 0xfe534d42u, 0x0bd00bd0u, 0x65735546u}) {
    EXPECT_TRUE(is_network_file_system(type)) << type;
  }
  const std::uint32_t ext4 = 0xef53, xfs = 0x58465342, tmpfs = 0x01021994, overlay = 0x794c7630;
  for (const std::uint32_t type : {0u, ext4, xfs, tmpfs, overlay}) {
    EXPECT_FALSE(is_network_file_system(type)) << type;
  }
}

TEST(NetworkFileSystem, ALocalFileIsOfThisMachine) {
  const TemporaryFolder folder;
  const std::string path =
      folder.write("model.safetensors", safetensors_bytes({{"a", "U8", {2}, "ab"}}));
  EXPECT_FALSE(local_storage().open(path)->is_on_network());
  EXPECT_FALSE(open_checkpoint(path)->shards()[0].is_on_network);
  EXPECT_FALSE(is_on_network(-1));
}

// The process has too few descriptors, so the pool closes the file's descriptor at once. In
// practice a read in another thread can cause this at any time.
TEST(NetworkFileSystem, IsAskedBeforeThePoolMayCloseTheDescriptor) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a", "a");
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = 32;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  DescriptorPool& pool = DescriptorPool::instance();
  std::vector<std::unique_ptr<PooledFile>> files;
  std::vector<std::unique_ptr<DescriptorPool::Use>> uses;
  const auto identity = local_storage().open(path)->identity();
  for (int i = 0; i < 8; ++i) {
    files.push_back(
        std::make_unique<PooledFile>(pool, path, pool.open_file(path.c_str()), identity));
    uses.push_back(std::make_unique<DescriptorPool::Use>(*files.back()));
  }
  const std::size_t open = pool.open_count();
  all_are_on_nfs = true;
  const auto file = local_storage().open(path);
  all_are_on_nfs = false;
  EXPECT_EQ(pool.open_count(), open);  // control: the file's descriptor was closed
  EXPECT_TRUE(file->is_on_network());
  uses.clear();
  EXPECT_FALSE(local_storage().open(path)->is_on_network());
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace

}  // namespace loadstone::test
