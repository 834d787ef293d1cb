// Tests that a text file which loadstone replaces contains the old or the new text after any
// failure.
#include "storage/whole_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "loadstone/error.h"
#include "support/errors.h"
#include "support/faulty_files.h"
#include "support/files.h"

namespace loadstone::test {

namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::string old_text = "OLD CONTENT";
const std::string new_text(100'000, 'n');

std::vector<std::string> names_in(const std::string& folder) {
  return local_storage().list(folder);
}

mode_t mode_of(const std::string& path) {
  struct stat status {};
  EXPECT_EQ(::lstat(path.c_str(), &status), 0);
  return status.st_mode & 07777;
}

TEST(WholeFile, IsNewOrInThePlaceOfAnOlderOne) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.json";
  write_whole_file(path, new_text);
  EXPECT_TRUE(read_file(path) == new_text);
  ASSERT_EQ(::chmod(path.c_str(), 0640), 0);
  write_whole_file(path, "short");
  EXPECT_EQ(read_file(path), "short");
  EXPECT_EQ(mode_of(path), 0640u);
  EXPECT_THAT(names_in(folder.path()), ElementsAre("a.json"));
}

TEST(WholeFile, LinksStayLinks) {
  const TemporaryFolder folder;
  const std::string real = folder.write("below/real.json", old_text);
  const std::string link = folder / "link.json";
  fs::create_symlink("below/real.json", link);
  write_whole_file(link, new_text);
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_TRUE(read_file(real) == new_text);
  EXPECT_THAT(names_in(folder / "below"), ElementsAre("real.json"));
}

TEST(WholeFile, PipesAndDescriptorsAreWrittenInPlace) {
  const TemporaryFolder folder;
  const std::string pipe = folder / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int reader = ::open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  const std::string named = folder.write("opened", "");
  const int opened = ::open(named.c_str(), O_RDWR);
  std::array<char, 16> got{};
  write_whole_file(pipe, "through");
  EXPECT_EQ(::read(reader, got.data(), got.size()), 7);
  EXPECT_EQ(std::string(got.data(), 7), "through");
  // If the caller opened the descriptor, as a shell does for standard output, the text is written
  // to it.
  write_whole_file("/dev/fd/" + std::to_string(opened), "through");
  EXPECT_EQ(::pread(opened, got.data(), got.size(), 0), 7);
  write_whole_file("/dev/null", "nothing");
  EXPECT_THAT(names_in(folder.path()), ElementsAre("opened", "pipe"));
  ::close(reader);
  ::close(opened);
}

TEST(WholeFile, ErrorsNameTheFileThatWasAskedFor) {
  const TemporaryFolder folder;
  const auto error = [](const std::string& path) -> std::string {
    try {
      write_whole_file(path, "x");
    } catch (const Error& problem) {
      return problem.what();
    }
    return {};
  };
  EXPECT_THAT(error(folder / "none/a"),
              HasSubstr(folder / "none/a: the system cannot write the file"));
  EXPECT_THAT(error(folder.path()), HasSubstr("[io.write]"));
  EXPECT_THAT(error(""), HasSubstr("[io.write]"));
  EXPECT_THAT(error(std::string("a\0b", 3)), HasSubstr("[io.write]"));
  const std::string url = error("https://h/d/x.json?X-Amz-Signature=S3CR3T");
  EXPECT_THAT(url, HasSubstr("[io.remote]"));
  EXPECT_THAT(url, ::testing::Not(HasSubstr("S3CR3T")));
  EXPECT_THAT(names_in(folder.path()), ElementsAre());
}

TEST(WholeFile, EveryCallFailsOnceInEveryWay) {
  for (const bool is_older : {false, true}) {
    for (const FileFault fault :
         {FileFault{.problem = EIO}, FileFault{.problem = ENOSPC}, FileFault{.problem = EINTR},
          FileFault{.is_short = true}, FileFault{.is_memory = true}}) {
      const bool is_mended = fault.problem == EINTR || fault.is_short;
      std::uint64_t number = 1;
      for (;; ++number) {
        const TemporaryFolder folder;
        const std::string path = folder / "plan.json";
        if (is_older) folder.write("plan.json", old_text);
        FaultyFiles files(fail_call(number, fault));
        const std::string code =
            code_of([&] { write_whole_file(path, new_text, files.writable()); });
        const bool came_about = files.calls() >= number;
        const auto names = names_in(folder.path());
        if (!code.empty()) {
          EXPECT_FALSE(is_mended) << number << " " << code;
          EXPECT_EQ(names.size(), is_older ? 1u : 0u);
          if (is_older) {
            EXPECT_EQ(read_file(path), old_text);
          }
        } else {
          EXPECT_TRUE(read_file(path) == new_text);
          EXPECT_THAT(names, ElementsAre("plan.json"));
        }
        if (!came_about || HasFailure()) break;
        EXPECT_EQ(code.empty(), is_mended || fault.is_short) << number;
      }
      EXPECT_GT(number, 3u);  // control: some calls failed
    }
  }
}

TEST(WholeFile, AKillAtEveryCallLeavesOldOrNew) {
  std::uint64_t number = 1;
  for (bool was_killed = true; was_killed; ++number) {
    const TemporaryFolder folder;
    const std::string path = folder.write("plan.json", old_text);
    was_killed = killed_at(
        number, [&](Storage& files) { write_whole_file(path, new_text, files.writable()); });
    const std::string found = read_file(path);
    EXPECT_TRUE(found == new_text || (was_killed && found == old_text)) << number;
  }
  EXPECT_GT(number, 3u);
}

// If the folder permits no new file, or the path is a mount point, loadstone must write in place.
TEST(WholeFile, IsWrittenInPlaceWhereTheFolderTakesNoNewOne) {
  for (const auto& [name, problem] :
       {std::pair{"create", EACCES}, std::pair{"create", EROFS}, std::pair{"rename", EBUSY}}) {
    const TemporaryFolder folder;
    const std::string path = folder.write("plan.json", old_text);
    FaultyFiles files([name = std::string(name), problem = problem](const FileCall& call) {
      return call.name == name ? FileFault{.problem = problem} : FileFault{};
    });
    write_whole_file(path, new_text, files.writable());
    EXPECT_TRUE(read_file(path) == new_text) << name;
    EXPECT_THAT(names_in(folder.path()), ElementsAre("plan.json")) << name;
    EXPECT_NE(code_of([&] { write_whole_file(folder / "new", new_text, files.writable()); }), "");
  }
}

}  // namespace

}  // namespace loadstone::test
