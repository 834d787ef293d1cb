#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "loadstone/catalog.h"
#include "loadstone/storage.h"
#include "support/errors.h"
#include "support/files.h"

namespace loadstone::test {

namespace {

using ::testing::ElementsAre;

class LocalStorage : public ::testing::Test {
 protected:
  std::string code_of_open(const std::string& path) {
    return code_of([&] { (void)local_storage().open(path); });
  }
  std::string read(const std::string& path, std::uint64_t offset, std::size_t bytes) {
    std::string text(bytes, '\0');
    local_storage().open(path)->read(offset, std::as_writable_bytes(std::span(text)));
    return text;
  }

  TemporaryFolder folder;
};

TEST_F(LocalStorage, ReadsAtAnyOffset) {
  const std::string bytes = some_bytes(100'000);
  const std::string path = folder.write("f", bytes);
  EXPECT_EQ(read(path, 0, bytes.size()), bytes);
  EXPECT_EQ(read(path, 4097, 1000), bytes.substr(4097, 1000));
  EXPECT_EQ(read(path, bytes.size(), 0), "");
  EXPECT_EQ(local_storage().open(path)->path(), path);
}

TEST_F(LocalStorage, FillsManyPiecesSomeEmpty) {
  const std::string bytes = some_bytes(5000);
  const auto source = local_storage().open(folder.write("f", bytes));
  std::string target(4000, '\0');
  std::vector<std::span<std::byte>> pieces;  // more pieces than one system call takes
  for (std::size_t i = 0; i < target.size(); ++i) {
    pieces.push_back(std::as_writable_bytes(std::span(target).subspan(i, 1)));
    if (i % 3 == 0) pieces.emplace_back();
  }
  source->read(7, pieces);
  EXPECT_EQ(target, bytes.substr(7, 4000));
}

// loadstone must request only bytes that are not in the page cache.
TEST_F(LocalStorage, AsksForWhatThePageCacheLacks) {
  const std::uint64_t size = (std::uint64_t{5} << 20) + 1234;
  const std::string path = folder.write("f", some_bytes(size));
  const auto source = local_storage().open(path);
  EXPECT_EQ(source->prefetch(0, size), 0u);
  EXPECT_EQ(source->prefetch(100, 0), 0u);
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ::fsync(descriptor);
  ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
  ::close(descriptor);
  const std::uint64_t asked = source->prefetch(4096, size - 4096);
  if (asked == 0) GTEST_SKIP() << "this file system is in memory";
  EXPECT_EQ(asked, size - 4096);
  EXPECT_EQ(read(path, size - 10, 10), some_bytes(size).substr(size - 10));
}

TEST_F(LocalStorage, TheEndOfTheFileIsAShortRead) {
  const std::string path = folder.write("f", "12345");
  for (const std::uint64_t offset : {std::uint64_t{3}, std::uint64_t{5}, std::uint64_t{1} << 40,
                                     std::uint64_t{1} << 63, UINT64_MAX}) {
    const auto error = error_of([&] { (void)read(path, offset, 3); });
    ASSERT_TRUE(error) << offset;
    EXPECT_EQ(error->code(), "io.short_read");
    EXPECT_EQ(error->where().path, path);
    EXPECT_TRUE(error->where().byte_offset);
  }
}

TEST_F(LocalStorage, IdentityIsAsItIsNow) {
  const std::string path = folder.write("f", "12345");
  const auto source = local_storage().open(path);
  const FileIdentity before = source->identity();
  EXPECT_EQ(before.bytes, 5u);
  std::filesystem::resize_file(path, 9);
  EXPECT_EQ(source->identity().bytes, 9u);
  std::filesystem::last_write_time(
      path, std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_NE(source->identity().modified_ns, before.modified_ns);
}

// A program can restore a file's size and modification time, but not its status change time and
// inode.
TEST_F(LocalStorage, IdentityTellsWhatTimeAndSizeHide) {
  const std::string path = folder.write("f", "12345");
  const auto source = local_storage().open(path);
  const FileIdentity before = source->identity();
  EXPECT_EQ(source->identity(), before);
  const auto time = std::filesystem::last_write_time(path);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // longer than the clock's resolution
  folder.write("f", "54321");
  std::filesystem::last_write_time(path, time);
  const FileIdentity rewritten = source->identity();
  EXPECT_EQ(rewritten.modified_ns, before.modified_ns);
  EXPECT_EQ(rewritten.inode, before.inode);
  EXPECT_NE(rewritten.changed_ns, before.changed_ns);
  std::filesystem::copy_file(path, folder / "g");
  std::filesystem::rename(folder / "g", path);
  const FileIdentity replaced = local_storage().open(path)->identity();
  EXPECT_NE(replaced.inode, before.inode);
  EXPECT_EQ(replaced.device, before.device);
}

TEST_F(LocalStorage, WhatCannotBeOpenedSaysWhy) {
  const std::string file = folder.write("f", "x");
  EXPECT_EQ(code_of_open(folder / "none"), "io.not_found");
  EXPECT_EQ(code_of_open(file + "/below"), "io.not_found");
  EXPECT_EQ(code_of_open(""), "io.not_found");
  EXPECT_EQ(code_of_open(folder.path()), "io.not_regular");
  EXPECT_EQ(code_of_open("/dev/null"), "io.not_regular");
  EXPECT_EQ(code_of_open(std::string("f\0g", 3)), "io.open");
  EXPECT_EQ(code_of_open(folder / std::string(5000, 'n')), "io.open");
  std::filesystem::create_symlink("loop", folder.path() / "loop");
  EXPECT_EQ(code_of_open(folder / "loop"), "io.open");
  if (::geteuid() != 0) {
    ::chmod(file.c_str(), 0);
    EXPECT_EQ(code_of_open(file), "io.denied");
  }
}

// An ordinary open() of a pipe without a writer would block forever.
TEST_F(LocalStorage, ANamedPipeNeverHangs) {
  const std::string pipe = folder / "model.safetensors";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(code_of_open(pipe), "io.not_regular");
  EXPECT_EQ(local_storage().kind(pipe), EntryKind::other);
  EXPECT_EQ(code_of([&] { (void)open_checkpoint(pipe); }), "ix.not_regular");
  EXPECT_EQ(code_of([&] { (void)open_checkpoint(folder.path()); }), "ix.not_regular");
  folder.write("model.safetensors.index.json", index_json({{"a", "model.safetensors"}}));
  EXPECT_EQ(code_of([&] { (void)open_checkpoint(folder.path()); }), "ix.not_regular");
}

TEST_F(LocalStorage, ASocketIsNoFile) {
  const std::string path = folder / "s.safetensors";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  ASSERT_LT(path.size(), sizeof address.sun_path);
  path.copy(address.sun_path, path.size());
  const int descriptor = ::socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(::bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(code_of_open(path), "io.not_regular");
  ::close(descriptor);
}

TEST_F(LocalStorage, ListsNamesInOrder) {
  folder.write("b", "");
  folder.write("a/inner", "");
  folder.write(".hidden", "");
  EXPECT_THAT(local_storage().list(folder.path()), ElementsAre(".hidden", "a", "b"));
  EXPECT_EQ(code_of([&] { (void)local_storage().list(folder / "none"); }), "io.not_found");
  EXPECT_EQ(code_of([&] { (void)local_storage().list(folder / "b"); }), "io.not_found");
}

TEST_F(LocalStorage, ResolvesLinks) {
  folder.write("a/file", "");
  std::filesystem::create_directory_symlink("a", folder.path() / "link");
  EXPECT_EQ(local_storage().resolve(folder / "link/../link/file"), folder / "a/file");
  EXPECT_EQ(local_storage().kind(folder / "link"), EntryKind::folder);
  EXPECT_EQ(code_of([&] { (void)local_storage().resolve(folder / "none"); }), "io.not_found");
}

TEST_F(LocalStorage, ManyThreadsReadOneFile) {
  const std::string bytes = some_bytes(1 << 20);
  const auto source = local_storage().open(folder.write("f", bytes));
  std::string target(bytes.size(), '\0');
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        for (std::size_t at = i * 4096; at < bytes.size(); at += 4 * 4096) {
          source->read(at, std::as_writable_bytes(std::span(target).subspan(at, 4096)));
        }
      });
    }
  }
  EXPECT_EQ(target, bytes);
}

TEST_F(LocalStorage, AHubCacheOnDiskOpensAndALinkOutOfItDoesNot) {
  const std::string bytes = safetensors_bytes({{"a", "U8", {2}, "ab"}});
  folder.write("models--x/blobs/1234", bytes);
  folder.write("elsewhere/x.safetensors", bytes);
  const auto snapshot = folder.path() / "models--x/snapshots/rev";
  std::filesystem::create_directories(snapshot);
  std::filesystem::create_symlink("../../blobs/1234", snapshot / "model.safetensors");
  EXPECT_EQ(open_checkpoint(snapshot)->tensors().size(), 1u);
  EXPECT_EQ(open_checkpoint(snapshot / "model.safetensors")->tensors().size(), 1u);
  std::filesystem::create_symlink(folder / "elsewhere/x.safetensors", snapshot / "x.safetensors");
  const std::string outside = snapshot / "x.safetensors";
  EXPECT_EQ(code_of([&] { (void)open_checkpoint(outside); }), "ix.path_escape");
  EXPECT_EQ(open_checkpoint(outside, {.allow_links = true})->tensors().size(), 1u);
}

TEST_F(LocalStorage, RelativePathsWork) {
  const auto before = std::filesystem::current_path();
  folder.write("m/model.safetensors", safetensors_bytes({{"a", "U8", {2}, "ab"}}));
  std::filesystem::current_path(folder.path() / "m");
  EXPECT_EQ(open_checkpoint(".")->tensors().size(), 1u);
  EXPECT_EQ(open_checkpoint("model.safetensors")->root(), ".");
  EXPECT_EQ(open_checkpoint("../m")->shards()[0].path, "../m/model.safetensors");
  EXPECT_EQ(open_checkpoint("mod*")->tensors().size(), 1u);
  std::filesystem::current_path(before);
}

}  // namespace

}  // namespace loadstone::test
