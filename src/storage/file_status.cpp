#include "storage/file_status.h"

namespace loadstone {

namespace {

std::int64_t nanoseconds(const struct timespec& time) noexcept {
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

FileIdentity identity_of(const struct stat& status) noexcept {
  return {.bytes = static_cast<std::uint64_t>(status.st_size),
          .modified_ns = nanoseconds(status.st_mtim),
          .changed_ns = nanoseconds(status.st_ctim),
          .inode = status.st_ino,
          .device = status.st_dev};
}

}  // namespace loadstone
