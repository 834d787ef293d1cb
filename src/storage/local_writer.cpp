// Implements the writing part of the local file system, with one system call in each function.
#include "storage/local_writer.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>

#include "storage/descriptor.h"
#include "storage/descriptor_pool.h"
#include "storage/file_status.h"
#include "storage/local_file.h"
#include "storage/new_file.h"

namespace loadstone {

namespace {

// One system call writes at most 2^31 - 4096 bytes.
constexpr std::size_t write_bytes_max = std::size_t{1} << 30;

// After this many written bytes, a file asks the system to start writing them to the disk, so that
// the fsync() at the end waits for few of them.
constexpr std::uint64_t start_sync_bytes = std::uint64_t{32} << 20;

int errno_of(int result) noexcept { return result == 0 ? 0 : errno; }

int reserve_if_cheap(int descriptor, off_t byte_count) {
  if (byte_count == 0 || ::fallocate(descriptor, 0, 0, byte_count) == 0) return 0;
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
  return errno_of(::ftruncate(descriptor, byte_count));
}

class LocalSink final : public FileSink {
 public:
  LocalSink(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}
  LocalSink(const LocalSink&) = delete;
  LocalSink& operator=(const LocalSink&) = delete;
  ~LocalSink() override {
    if (memory_ != nullptr) ::munmap(memory_, byte_count_);
  }

  [[nodiscard]] const std::string& path() const noexcept override { return path_; }

  int try_reserve(std::uint64_t byte_count, Reserve how) override {
    if (how == Reserve::if_cheap) {
      return reserve_if_cheap(descriptor_.get(), static_cast<off_t>(byte_count));
    }
    return byte_count == 0
               ? 0
               : ::posix_fallocate(descriptor_.get(), 0, static_cast<off_t>(byte_count));
  }

  std::int64_t try_write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    // Exceeding the limit for file sizes would raise a signal instead of an error.
    const std::size_t count = std::min(bytes.size(), write_bytes_max);
    if (!may_grow_to(offset + count)) return -EFBIG;
    const ssize_t written =
        ::pwrite(descriptor_.get(), bytes.data(), count, static_cast<off_t>(offset));
    if (written < 0) return -errno;
    start_sync(static_cast<std::uint64_t>(written));
    return written;
  }

  int try_map(std::uint64_t byte_count, std::byte*& memory) override {
    void* const pages = ::mmap(nullptr, static_cast<std::size_t>(byte_count),
                               PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
    if (pages == MAP_FAILED) return errno;
    memory = memory_ = static_cast<std::byte*>(pages);
    byte_count_ = static_cast<std::size_t>(byte_count);
    // The mapping keeps the file open, and msync() reports its errors, so the descriptor can be
    // closed.
    descriptor_ = Descriptor();
    return 0;
  }

  int try_sync() override {
    if (memory_ != nullptr) return errno_of(::msync(memory_, byte_count_, MS_SYNC));
    return errno_of(::fsync(descriptor_.get()));
  }

  // Asks Linux to write dirty pages and to drop clean ones from the page cache.
  void release() noexcept override {
    if (memory_ == nullptr) ::posix_fadvise(descriptor_.get(), 0, 0, POSIX_FADV_DONTNEED);
  }

 private:
  // Thread-safe, like try_write().
  void start_sync(std::uint64_t written) noexcept {
    if (unsynced_.fetch_add(written) + written < start_sync_bytes) return;
    unsynced_ = 0;
    // Needs no result: a file system that cannot do this writes the bytes at fsync().
    static_cast<void>(::sync_file_range(descriptor_.get(), 0, 0, SYNC_FILE_RANGE_WRITE));
  }

  std::string path_;
  Descriptor descriptor_;
  std::atomic<std::uint64_t> unsynced_ = 0;
  std::byte* memory_ = nullptr;
  std::size_t byte_count_ = 0;
};

class LocalLock final : public FileLock {
 public:
  LocalLock(std::string path, int descriptor) : path_(std::move(path)), descriptor_(descriptor) {}

  [[nodiscard]] const std::string& path() const noexcept override { return path_; }

  int try_take(LockMode mode, bool waits) override {
    const int kind = mode == LockMode::shared ? LOCK_SH : LOCK_EX;
    return errno_of(::flock(descriptor_.get(), waits ? kind : kind | LOCK_NB));
  }

  [[nodiscard]] bool is_named() const override {
    struct stat open {};
    struct stat named {};
    return ::fstat(descriptor_.get(), &open) == 0 && ::lstat(path_.c_str(), &named) == 0 &&
           open.st_dev == named.st_dev && open.st_ino == named.st_ino;
  }

 private:
  std::string path_;
  Descriptor descriptor_;
};

// Returns true if the path contains a NUL, at which system calls would cut it.
bool is_cut(const std::string& path) noexcept { return path.find('\0') != std::string::npos; }

// Thread-safe, because it has no state.
class LocalWriter final : public WritableStorage {
 public:
  int try_status(const std::string& path, bool follows_link, FileStatus& status) override {
    if (is_cut(path)) return EINVAL;
    struct stat found {};
    const int result = follows_link ? ::stat(path.c_str(), &found) : ::lstat(path.c_str(), &found);
    if (result != 0) return errno;
    status = status_of(found);
    struct statx mount {};
    const int flags = follows_link ? 0 : AT_SYMLINK_NOFOLLOW;
    status.is_mount_point = ::statx(AT_FDCWD, path.c_str(), flags, 0, &mount) == 0 &&
                            (mount.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
    return 0;
  }

  // Does not use std::filesystem, whose iterators end the process if memory runs out.
  int try_list(const std::string& folder, std::vector<std::string>& names) override {
    const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(folder.c_str()), &::closedir);
    if (!stream) return errno;
    while (true) {
      errno = 0;  // readdir() returns null for the end and for errors, which set errno
      const dirent* const entry = ::readdir(stream.get());
      if (entry == nullptr) return errno;
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);
    }
  }

  int try_open(const std::string& path, std::shared_ptr<ByteSource>& file) override {
    if (is_cut(path)) return EINVAL;
    Descriptor opened(DescriptorPool::instance().open_file(path.c_str(), O_NOFOLLOW));
    struct stat status {};
    if (opened.get() < 0 || ::fstat(opened.get(), &status) != 0) return errno;
    if (S_ISDIR(status.st_mode)) return EISDIR;
    if (!S_ISREG(status.st_mode)) return ENXIO;
    file = local_file(path, std::move(opened), status);
    return 0;
  }

  int try_resolve(const std::string& path, std::string& real) override {
    std::error_code problem;
    const auto absolute = std::filesystem::absolute(path, problem);
    if (!problem) real = std::filesystem::weakly_canonical(absolute, problem).string();
    return problem.value();
  }

  int try_free_bytes(const std::string& folder, std::uint64_t& bytes) override {
    struct statvfs status {};
    if (::statvfs(folder.c_str(), &status) != 0) return errno;
    bytes = std::uint64_t{status.f_bavail} * std::uint64_t{status.f_frsize};
    return 0;
  }

  int try_permit(const std::string& path, std::uint32_t permissions) override {
    return is_cut(path) ? EINVAL : errno_of(::chmod(path.c_str(), permissions));
  }

  int try_create(const std::string& path, std::unique_ptr<FileSink>& file) override {
    if (is_cut(path)) return EINVAL;
    Descriptor made(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (made.get() < 0) return errno;
    try {
      file = std::make_unique<LocalSink>(path, made.get());
    } catch (...) {
      ::unlink(path.c_str());
      throw;
    }
    static_cast<void>(made.release());
    return 0;
  }

  int try_make_folder(const std::string& path) override {
    return is_cut(path) ? EINVAL : errno_of(::mkdir(path.c_str(), 0777));
  }
  int try_rename(const std::string& from, const std::string& to) override {
    return is_cut(from) || is_cut(to) ? EINVAL : errno_of(::rename(from.c_str(), to.c_str()));
  }
  int try_exchange(const std::string& a, const std::string& b) override {
    return errno_of(::renameat2(AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE));
  }
  int try_link(const std::string& from, const std::string& to) override {
    return is_cut(from) || is_cut(to) ? EINVAL : errno_of(::link(from.c_str(), to.c_str()));
  }
  int try_remove(const std::string& path) override {
    return is_cut(path) ? EINVAL : errno_of(::unlink(path.c_str()));
  }
  int try_remove_folder(const std::string& path) override {
    return is_cut(path) ? EINVAL : errno_of(::rmdir(path.c_str()));
  }
  int try_sync_folder(const std::string& path) override {
    const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    return folder.get() < 0 ? errno : errno_of(::fsync(folder.get()));
  }

  int try_open_lock(const std::string& path, std::unique_ptr<FileLock>& lock) override {
    if (is_cut(path)) return EINVAL;
    // Opens the file for writing, because network file systems lock only writable files.
    Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666));
    if (file.get() < 0 && errno == EISDIR) {
      file = Descriptor(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    }
    if (file.get() < 0) return errno;
    auto made = std::make_unique<LocalLock>(path, file.get());
    static_cast<void>(file.release());
    lock = std::move(made);
    return 0;
  }
};

}  // namespace

WritableStorage& local_writer() {
  static LocalWriter writer;
  return writer;
}

}  // namespace loadstone
