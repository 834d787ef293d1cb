#include "storage/regular_file.h"

#include <cerrno>

#include "loadstone/error.h"
#include "storage/descriptor_pool.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

[[noreturn]] void refuse_kind(const std::string& path, const char* found) {
  throw Error("io.not_regular", "not a regular file",
              {.path = path, .found = found, .expected = "a regular file"});
}

}  // namespace

void fail_open(const std::string& path, int problem, const char* doing) {
  if (is_remote(path)) {
    throw Error("io.remote", "a file on another machine can only be read through a remote storage",
                {.path = path});
  }
  const bool is_plain = problem == ENOENT || problem == EACCES;  // the message explains these
  const Where where = {.path = path, .system_error = is_plain ? 0 : problem};
  if (problem == ENOENT || problem == ENOTDIR) {
    throw Error("io.not_found", "there is no such file or folder", where);
  }
  if (problem == EACCES || problem == EPERM) {
    throw Error("io.denied", "the system denies access", where);
  }
  throw Error("io.open", doing, where);
}

void require_whole_path(const std::string& path) {
  if (path.find('\0') != std::string::npos)
    fail_open(path, EINVAL, "the path contains a NUL character");
}

Descriptor open_regular(const std::string& path, struct stat& status) {
  require_whole_path(path);
  Descriptor file(DescriptorPool::instance().open_file(path.c_str()));
  if (file.get() < 0) {
    // Opening a socket, or a device without a driver, fails.
    if (errno == ENXIO || errno == ENODEV) refuse_kind(path, "a socket or device");
    fail_open(path, errno, "the system cannot open the file");
  }
  if (::fstat(file.get(), &status) != 0)
    fail_open(path, errno, "the system cannot inspect the file");
  if (S_ISREG(status.st_mode)) return file;
  refuse_kind(path, S_ISDIR(status.st_mode)    ? "a folder"
                    : S_ISFIFO(status.st_mode) ? "a named pipe"
                                               : "a device");
}

}  // namespace loadstone
