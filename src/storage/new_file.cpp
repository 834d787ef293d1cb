#include "storage/new_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <limits>

#include "loadstone/error.h"

namespace loadstone {

void fail_write(int problem, std::string message, std::string path, std::string tensor) {
  Where where;
  where.path = std::move(path);
  where.tensor = std::move(tensor);
  where.system_error = problem;
  const char* code = "io.write";
  if (problem == ENOSPC || problem == EDQUOT || problem == EFBIG) code = "io.no_space";
  if (problem == EACCES || problem == EPERM || problem == EROFS) code = "io.denied";
  throw Error(code, std::move(message), std::move(where));
}

Descriptor::~Descriptor() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void check_file_limit(std::uint64_t byte_count, const std::string& path) {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      byte_count > limit.rlim_cur) {
    fail_write(EFBIG, "the process may not write files of this size", path);
  }
  if (byte_count > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
    fail_write(EFBIG, "the file would be too large", path);
  }
}

void reserve(int descriptor, std::uint64_t byte_count, const std::string& path) {
  check_file_limit(byte_count, path);
  int problem = EINTR;
  while (problem == EINTR) {
    problem = ::posix_fallocate(descriptor, 0, static_cast<off_t>(byte_count));
  }
  if (problem != 0) fail_write(problem, "cannot reserve space for the file", path);
}

void reserve_if_cheap(int descriptor, std::uint64_t byte_count, const std::string& path) {
  check_file_limit(byte_count, path);
  if (byte_count == 0) return;
  int result = -1;
  do {
    result = ::fallocate(descriptor, 0, 0, static_cast<off_t>(byte_count));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno != EOPNOTSUPP && errno != ENOSYS) {
    fail_write(errno, "cannot reserve space for the file", path);
  }
  if (::ftruncate(descriptor, static_cast<off_t>(byte_count)) != 0) {
    fail_write(errno, "cannot make the file as large as it will be", path);
  }
}

std::string unique_part_name() {
  static std::atomic<std::uint64_t> count = 0;
  return ".loadstone-" + std::to_string(::getpid()) + "-" + std::to_string(count++) + ".part";
}

}  // namespace loadstone
