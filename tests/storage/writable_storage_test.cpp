// Tests reads of a file that is still being written, and wrappers that forward every call.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cerrno>
#include <filesystem>

#include "loadstone/storage.h"
#include "storage/forwarding.h"
#include "support/errors.h"
#include "support/faulty_files.h"
#include "support/files.h"

namespace loadstone::test {

namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class WritableStorageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder.write("b", "text");
    folder.write("a/c", "");
    fs::create_symlink("a", folder / "link");
  }

  WritableStorage& disk = local_storage().writable();
  TemporaryFolder folder;
};

TEST_F(WritableStorageTest, StatusOfWhatIsThere) {
  EXPECT_EQ(disk.status(folder / "none"), std::nullopt);
  EXPECT_EQ(disk.status(folder / "b/none"), std::nullopt);
  const auto file = disk.status(folder / "b");
  ASSERT_TRUE(file);
  EXPECT_EQ(file->kind, EntryKind::file);
  EXPECT_EQ(file->identity, local_storage().open(folder / "b")->identity());
  EXPECT_EQ(disk.status(folder / "a")->kind, EntryKind::folder);
  EXPECT_EQ(disk.status(folder / "link")->kind, EntryKind::link);
  EXPECT_EQ(disk.status(folder / "link", true)->kind, EntryKind::folder);
  EXPECT_TRUE(disk.permit(folder / "b", 0600));
  EXPECT_EQ(disk.status(folder / "b")->permissions, 0600u);
  EXPECT_FALSE(disk.permit(folder / "none", 0600));
}

TEST_F(WritableStorageTest, ListsFolders) {
  EXPECT_THAT(disk.list(folder.path()), ElementsAre("a", "b", "link"));
  EXPECT_THAT(disk.list(folder / "none"), IsEmpty());
  EXPECT_THAT(disk.list(folder / "b"), IsEmpty());
}

TEST_F(WritableStorageTest, ReadsRegularFilesOnly) {
  EXPECT_EQ(disk.read_begin(folder / "b", 2), "te");
  EXPECT_EQ(disk.read_begin(folder / "b", 100), "text");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  for (const auto& [name, problem] :
       {std::pair("none", ENOENT), {"a", EISDIR}, {"link", ELOOP}, {"pipe", ENXIO}}) {
    std::shared_ptr<ByteSource> file;
    EXPECT_EQ(disk.open(folder / name, file), problem) << name;
    EXPECT_EQ(disk.read_begin(folder / name, 2), std::nullopt) << name;
  }
  FaultyFiles files(fail_call(1, {.problem = EIO}));
  EXPECT_EQ(code_of([&] { (void)files.writable().read_begin(folder / "b", 2); }), "io.read");
}

TEST_F(WritableStorageTest, ResolvesPathsAsFarAsTheyExist) {
  const std::string real = local_storage().resolve(folder.path());
  EXPECT_EQ(disk.real_path(folder / "link/new/file"), real + "/a/new/file");
  EXPECT_GT(disk.free_bytes(folder.path()), 0u);
  EXPECT_EQ(disk.free_bytes(folder / "none"), std::nullopt);
}

class Whole final : public ByteSource {
 public:
  [[nodiscard]] const std::string& path() const noexcept override { return name; }
  [[nodiscard]] FileIdentity identity() const override { return {.bytes = 1}; }
  [[nodiscard]] unsigned reads_at_once() const noexcept override { return 2; }
  [[nodiscard]] bool is_on_network() const override { return true; }
  using ByteSource::read;
  void read(std::uint64_t, std::span<const std::span<std::byte>>) override { calls += "read "; }
  std::uint64_t prefetch(std::uint64_t, std::uint64_t bytes) noexcept override { return bytes; }
  [[nodiscard]] std::optional<double> cached_share() const override { return 0.5; }
  void release(std::uint64_t, std::uint64_t) noexcept override { calls += "release"; }

  std::string name = "/whole";
  std::string calls;
};

TEST(ForwardingSource, ForwardsAll) {
  const auto whole = std::make_shared<Whole>();
  ForwardingSource source(whole);
  EXPECT_EQ(source.path(), "/whole");
  EXPECT_EQ(source.identity().bytes, 1u);
  EXPECT_EQ(source.reads_at_once(), 2u);
  EXPECT_TRUE(source.is_on_network());
  EXPECT_EQ(source.prefetch(0, 7), 7u);
  EXPECT_EQ(source.cached_share(), 0.5);
  source.read(0, std::span<std::byte>());
  source.release(0, 1);
  EXPECT_EQ(whole->calls, "read release");
}

}  // namespace

}  // namespace loadstone::test
