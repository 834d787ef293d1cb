// Tests reads of more files than the process may have descriptors.
#include "storage/descriptor_pool.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <random>
#include <thread>

#include "loadstone/storage.h"
#include "support/errors.h"
#include "support/files.h"

namespace loadstone::test {
namespace {

// Sets the process's RLIMIT_NOFILE and restores it on destruction.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t limit) {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit now = before_;
    now.rlim_cur = limit;
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &now), 0);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  DescriptorLimit(const DescriptorLimit&) = delete;
  DescriptorLimit& operator=(const DescriptorLimit&) = delete;

 private:
  rlimit before_ = {};
};

std::string text_of(std::size_t number) { return "file " + std::to_string(1000 + number); }

class Descriptors : public testing::Test {
 protected:
  void open(std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      paths.push_back(folder.write(std::to_string(i), text_of(i)));
    }
    for (const std::string& path : paths) files.push_back(local_storage().open(path));
  }

  std::string read(std::size_t number) {
    std::string text(text_of(number).size(), '\0');
    files[number]->read(0, std::as_writable_bytes(std::span(text)));
    return text;
  }

  // Reads enough other files for the pool to close the first file's descriptor.
  void use_others() {
    for (std::size_t i = 1; i < files.size(); ++i) EXPECT_EQ(read(i), text_of(i));
  }

  TemporaryFolder folder;
  std::vector<std::string> paths;
  std::vector<std::shared_ptr<ByteSource>> files;
};

TEST_F(Descriptors, ThreeHundredFilesUnderALimitOfSixtyFour) {
  const DescriptorLimit limit(64);
  open(300);
  EXPECT_LE(DescriptorPool::instance().open_count(), 16u);
  std::atomic<unsigned> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
      threads.emplace_back([&, seed] {
        std::mt19937 random(seed);
        for (int i = 0; i < 2000; ++i) {
          const std::size_t number = random() % files.size();
          wrong += read(number) == text_of(number) ? 0 : 1;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_LE(DescriptorPool::instance().open_count(), 16u);
  const std::size_t before = DescriptorPool::instance().open_count();
  files.clear();
  EXPECT_LT(DescriptorPool::instance().open_count(), before);
}

// If other code holds almost all descriptors, the pool must work with fewer than it planned for.
TEST_F(Descriptors, WhereOthersHaveTakenAllButFew) {
  const DescriptorLimit limit(64);
  open(100);
  std::vector<int> taken;
  while (true) {
    const int descriptor = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) break;
    taken.push_back(descriptor);
  }
  for (int i = 0; i < 2; ++i) {
    ::close(taken.back());
    taken.pop_back();
  }
  std::atomic<unsigned> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (unsigned seed = 0; seed < 6; ++seed) {
      threads.emplace_back([&, seed] {
        for (std::size_t i = 0; i < files.size(); ++i) {
          const std::size_t number = (i + seed * 17) % files.size();
          wrong += read(number) == text_of(number) ? 0 : 1;
        }
      });
    }
  }
  for (const int descriptor : taken) ::close(descriptor);
  EXPECT_EQ(wrong, 0u);
}

TEST_F(Descriptors, NoneAtAllIsAnError) {
  const std::string path = folder.write("f", "x");
  const DescriptorLimit limit(0);
  EXPECT_EQ(code_of([&] { (void)local_storage().open(path); }), "io.open");
}

TEST_F(Descriptors, AFileThatIsOpenedAgainMustBeTheSame) {
  const DescriptorLimit limit(64);
  const auto code_after = [&](auto change) {
    files.clear();
    paths.clear();
    open(40);
    use_others();
    change(paths[0]);
    use_others();
    return code_of([&] { (void)read(0); });
  };
  const auto write = [](const std::string& path, const std::string& text) {
    const int descriptor = ::open(path.c_str(), O_WRONLY | O_TRUNC | O_CREAT | O_CLOEXEC, 0600);
    EXPECT_EQ(::write(descriptor, text.data(), text.size()), ssize_t(text.size()));
    ::close(descriptor);
  };
  EXPECT_EQ(code_after([](const std::string&) {}), "");
  EXPECT_EQ(code_after([&](const std::string& path) { write(path, text_of(7)); }), "io.changed");
  EXPECT_EQ(code_after([&](const std::string& path) {
              const auto time = std::filesystem::last_write_time(path);
              write(path + ".new", text_of(0));
              std::filesystem::last_write_time(path + ".new", time);
              std::filesystem::rename(path + ".new", path);
            }),
            "io.changed");
  EXPECT_EQ(code_after([](const std::string& path) { std::filesystem::remove(path); }),
            "io.changed");
}

// A forked child has only one thread, so a lock that another thread of the parent held would stay
// locked.
TEST_F(Descriptors, AChildReadsToo) {
  const DescriptorLimit limit(64);
  open(100);
  std::atomic<bool> stop = false;
  std::jthread reader([&] {
    for (std::size_t i = 0; !stop; ++i) (void)read(i % files.size());
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      std::string text(text_of(0).size(), '\0');
      bool right = true;
      for (std::size_t k = 0; k < files.size(); ++k) {
        files[k]->read(0, std::as_writable_bytes(std::span(text)));
        right = right && text == text_of(k);
      }
      ::_exit(right ? 0 : 1);
    }
    int status = -1;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  stop = true;
}

}  // namespace
}  // namespace loadstone::test
