#include "storage/descriptor_pool.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "loadstone/error.h"
#include "storage/file_status.h"

namespace loadstone {

namespace {

// Minimum limit of open files. With fewer, even a few threads would reopen a file for each read.
constexpr std::size_t open_min = 8;
// Limits the wait for a descriptor. Waiting helps if another thread has just opened a file and is
// about to add it to the pool, because the pool can close it then.
constexpr unsigned attempts_max = 50;
constexpr auto attempt_interval = std::chrono::milliseconds(1);

std::size_t open_limit() noexcept {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return open_min;
  return std::clamp<std::size_t>(limit.rlim_cur / 4, open_min, DescriptorPool::open_max);
}

// Opens with O_NONBLOCK, because opening a named pipe without a writer would block for ever. The
// flag has no effect on regular files. Callers reject other files by the descriptor, not by the
// path.
int open_once(const char* path, int flags) noexcept {
  int descriptor = -1;
  do {
    descriptor = ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | flags);
  } while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

[[noreturn]] void refuse(const std::string& path, const char* code, const char* message,
                         int problem) {
  throw Error(code, message, {.path = path, .system_error = problem});
}

}  // namespace

PooledFile::PooledFile(DescriptorPool& pool, std::string path, int descriptor,
                       FileIdentity identity)
    : pool_(pool), path_(std::move(path)), identity_(identity) {
  pool_.add(*this, descriptor);
}

PooledFile::~PooledFile() { pool_.remove(*this); }

DescriptorPool& DescriptorPool::instance() {
  // The pool is never destroyed, because files may outlive static objects.
  static DescriptorPool& pool = *[] {
    auto* made = new DescriptorPool;
    // A child has only the thread that called fork(), so no other thread would unlock the mutex or
    // return a descriptor there.
    ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] {
                       instance().forget_users();
                       instance().mutex_.unlock();
                     });
    return made;
  }();
  return pool;
}

int DescriptorPool::open_file(const char* path, int flags) noexcept {
  for (unsigned attempt = 0;; ++attempt) {
    const int descriptor = open_once(path, flags);
    if (descriptor >= 0 || (errno != EMFILE && errno != ENFILE)) return descriptor;
    const int problem = errno;
    if (make_room(attempt)) continue;
    errno = problem;
    return -1;
  }
}

std::size_t DescriptorPool::open_count() {
  const std::lock_guard lock(mutex_);
  return open_;
}

int DescriptorPool::take(PooledFile& file) {
  {
    const std::lock_guard lock(mutex_);
    if (file.descriptor_ >= 0) {
      if (file.users_++ == 0) ++used_;
      file.used_at_ = ++clock_;
      return file.descriptor_;
    }
  }
  // Opens the file without the lock, because a slow file system must not block readers of other
  // files.
  const int descriptor = open_file(file.path_.c_str());
  if (descriptor < 0) {
    const int problem = errno;
    if (problem == ENOENT || problem == ENOTDIR) {
      refuse(file.path_, "io.changed", "the file was removed after it was opened", problem);
    }
    refuse(file.path_, problem == EACCES || problem == EPERM ? "io.denied" : "io.open",
           "the system cannot open the file again", problem);
  }
  struct stat status {};
  const bool is_known = ::fstat(descriptor, &status) == 0;
  if (!is_known || identity_of(status) != file.identity_) {
    const int problem = is_known ? 0 : errno;
    ::close(descriptor);
    refuse(file.path_, "io.changed", "the file was written to or replaced while it was in use",
           problem);
  }
  const std::lock_guard lock(mutex_);
  if (file.users_++ == 0) ++used_;
  adopt(file, descriptor);
  return file.descriptor_;
}

void DescriptorPool::give_back(PooledFile& file) noexcept {
  const std::lock_guard lock(mutex_);
  if (file.users_ == 0 || --file.users_ > 0) return;  // 0 if the use began before a fork()
  --used_;
  if (open_ > limit_) close_beyond_limit();
}

void DescriptorPool::add(PooledFile& file, int descriptor) {
  const std::lock_guard lock(mutex_);
  files_.push_back(&file);
  adopt(file, descriptor);
}

void DescriptorPool::remove(PooledFile& file) noexcept {
  const std::lock_guard lock(mutex_);
  if (file.descriptor_ >= 0) close(file);
  const auto found = std::ranges::find(files_, &file);
  if (found == files_.end()) return;
  *found = files_.back();
  files_.pop_back();
}

void DescriptorPool::adopt(PooledFile& file, int descriptor) noexcept {
  file.used_at_ = ++clock_;
  if (file.descriptor_ >= 0) {  // another thread has opened the file too
    ::close(descriptor);
    return;
  }
  file.descriptor_ = descriptor;
  ++open_;
  limit_ = open_limit();
  close_beyond_limit();
}

void DescriptorPool::close(PooledFile& file) noexcept {
  ::close(std::exchange(file.descriptor_, -1));
  --open_;
}

// Closes the least recently used file. Returns false if all open files are in use.
bool DescriptorPool::close_idle() noexcept {
  PooledFile* oldest = nullptr;
  for (PooledFile* const file : files_) {
    if (file->descriptor_ < 0 || file->users_ > 0) continue;
    if (oldest == nullptr || file->used_at_ < oldest->used_at_) oldest = file;
  }
  if (oldest == nullptr) return false;
  close(*oldest);
  return true;
}

void DescriptorPool::close_beyond_limit() noexcept {
  while (open_ > limit_ && close_idle()) {
  }
}

// Returns false if waiting is useless, because code outside this pool has the descriptors open.
bool DescriptorPool::make_room(unsigned attempt) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (close_idle()) return true;
    if (used_ == 0 && attempt >= attempts_max) return false;
  }
  std::this_thread::sleep_for(attempt_interval);
  return true;
}

void DescriptorPool::forget_users() noexcept {
  for (PooledFile* const file : files_) file->users_ = 0;
  used_ = 0;
}

}  // namespace loadstone
