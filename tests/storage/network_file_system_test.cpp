#include "storage/network_file_system.h"

#include <gtest/gtest.h>

#include "loadstone/catalog.h"
#include "support/files.h"

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

// No network is mounted where tests run: what is asked for is that a local file is none.
TEST(NetworkFileSystem, ALocalFileIsOfThisMachine) {
  const TemporaryFolder folder;
  const std::string path =
      folder.write("model.safetensors", safetensors_bytes({{"a", "U8", {2}, "ab"}}));
  EXPECT_FALSE(local_storage().open(path)->is_on_network());
  EXPECT_FALSE(open_checkpoint(path)->shards()[0].is_on_network);
  EXPECT_FALSE(is_on_network(-1));
}

}  // namespace

}  // namespace loadstone::test
