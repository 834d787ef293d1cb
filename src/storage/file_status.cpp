#include "storage/file_status.h"

namespace loadstone {

namespace {

std::int64_t nanoseconds(const struct timespec& time) noexcept {
  return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

EntryKind kind_of(mode_t mode) noexcept {
  if (S_ISREG(mode)) return EntryKind::file;
  if (S_ISDIR(mode)) return EntryKind::folder;
  return S_ISLNK(mode) ? EntryKind::link : EntryKind::other;
}

}  // namespace

FileIdentity identity_of(const struct stat& status) noexcept {
  return {.bytes = static_cast<std::uint64_t>(status.st_size),
          .modified_ns = nanoseconds(status.st_mtim),
          .changed_ns = nanoseconds(status.st_ctim),
          .inode = status.st_ino,
          .device = status.st_dev};
}

FileStatus status_of(const struct stat& status) noexcept {
  return {.kind = kind_of(status.st_mode),
          .identity = identity_of(status),
          .bytes_on_disk = static_cast<std::uint64_t>(status.st_blocks) * 512,
          .permissions = status.st_mode & 07777};
}

}  // namespace loadstone
