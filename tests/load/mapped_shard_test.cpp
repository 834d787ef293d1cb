#include "load/mapped_shard.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "loadstone/error.h"
#include "plan/costs.h"

namespace loadstone {
namespace {

namespace fs = std::filesystem;

class MappedShardTest : public ::testing::Test {
 protected:
  MappedShardTest() {
    std::string name = (fs::temp_directory_path() / "loadstone-mapped-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
    shard_.path = (folder_ / "model.safetensors").string();
    write("0123456789");
    shard_.identity = local_storage().open(shard_.path)->identity();
  }
  ~MappedShardTest() override { fs::remove_all(folder_); }

  void write(const std::string& text) const {
    std::ofstream(shard_.path, std::ios::binary) << text;
  }
  [[nodiscard]] std::string code_of_open() const {
    try {
      (void)MappedShard::open(shard_);
    } catch (const Error& error) {
      return error.code();
    }
    return "none";
  }

  fs::path folder_;
  Shard shard_;
};

TEST_F(MappedShardTest, ShowsTheFileAndKeepsWritesToItself) {
  const auto mapped = MappedShard::open(shard_);
  const auto bytes = mapped->bytes(2, 5);
  ASSERT_EQ(bytes.size(), 3u);
  EXPECT_EQ(std::memcmp(bytes.data(), "234", 3), 0);
  bytes[0] = std::byte{'x'};
  std::string text;
  std::ifstream(shard_.path) >> text;
  EXPECT_EQ(text, "0123456789");
  EXPECT_EQ(std::memcmp(mapped->bytes(0, 4).data(), "01x3", 4), 0);
}

TEST_F(MappedShardTest, RangesStayInside) {
  const auto mapped = MappedShard::open(shard_);
  EXPECT_EQ(mapped->bytes(10, 10).size(), 0u);
  EXPECT_THROW((void)mapped->bytes(0, 11), Error);
  EXPECT_THROW((void)mapped->bytes(5, 4), Error);
}

TEST_F(MappedShardTest, RefusesAnotherFile) {
  EXPECT_EQ(code_of_open(), "none");
  write("0123456789a");
  EXPECT_EQ(code_of_open(), "io.changed");
  fs::remove(shard_.path);
  EXPECT_EQ(code_of_open(), "io.not_found");
  ASSERT_EQ(::mkfifo(shard_.path.c_str(), 0600), 0);
  EXPECT_EQ(code_of_open(), "io.not_regular");
}

TEST_F(MappedShardTest, OnlyAlignedTensorsCanBeViewed) {
  const auto tensor = [](Encoding encoding, std::uint64_t begin, std::uint64_t end) {
    return TensorInfo{.name = "t", .encoding = encoding, .offset_begin = begin, .offset_end = end};
  };
  EXPECT_TRUE(can_view(tensor(Dtype::f32, 8, 16)));
  EXPECT_FALSE(can_view(tensor(Dtype::f32, 6, 14)));
  EXPECT_TRUE(can_view(tensor(Dtype::bf16, 6, 14)));
  EXPECT_TRUE(can_view(tensor(Dtype::u8, 7, 14)));
  EXPECT_TRUE(can_view(tensor(Dtype::f64, 7, 7)));
  EXPECT_FALSE(can_view(tensor(BlockFormat::q4_k, 32, 176)));
}

}  // namespace
}  // namespace loadstone
