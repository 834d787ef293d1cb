#include "convert/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "loadstone/error.h"

namespace loadstone {

std::optional<struct stat> status_of(const std::string& path, bool follows) {
  struct stat status {};
  const int result = follows ? ::stat(path.c_str(), &status) : ::lstat(path.c_str(), &status);
  if (result == 0) return status;
  if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
  Where where;
  where.path = path;
  where.system_error = errno;
  throw Error(errno == EACCES ? "io.denied" : "io.open", "cannot look at the target", where);
}

bool same_file(const struct stat& a, const struct stat& b) noexcept {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

bool same_file(const std::string& a, const std::string& b) {
  const auto left = status_of(a, false);
  const auto right = status_of(b, false);
  return left && right && same_file(*left, *right);
}

bool is_plain_folder(const std::string& path) {
  const auto status = status_of(path, false);
  return status && S_ISDIR(status->st_mode);
}

void sync_file(int descriptor, const std::string& path) {
  if (::fsync(descriptor) != 0) fail_write(errno, "cannot bring the file to the disk", path);
}

void sync_folder(const std::string& path) {
  const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) fail_write(errno, "cannot open the folder", path);
  // Some file systems cannot do that to a folder; what is renamed there is safe all the same.
  if (::fsync(folder.get()) != 0 && errno != EINVAL) {
    fail_write(errno, "cannot bring the folder to the disk", path);
  }
}

void write_all(int descriptor, std::uint64_t offset, std::span<const std::byte> bytes,
               const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t count =
        ::pwrite(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail_write(count < 0 ? errno : ENOSPC, "cannot write the file", path);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
}

void give_name(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail_write(errno, "cannot give the file its name", to);
  }
}

Descriptor new_file(const std::string& path) {
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (file.get() < 0) fail_write(errno, "cannot make the file", path);
  return file;
}

void write_whole(const std::string& path, const std::string& unfinished, std::string_view text) {
  const Descriptor file = new_file(unfinished);
  write_all(file.get(), 0, std::as_bytes(std::span(text)), unfinished);
  sync_file(file.get(), unfinished);
  give_name(unfinished, path);
}

std::optional<std::string> read_begin(const std::string& path, std::size_t bytes_max) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    return std::nullopt;
  }
  std::string text(std::min<std::uint64_t>(bytes_max, static_cast<std::uint64_t>(status.st_size)),
                   '\0');
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t count =
        ::pread(file.get(), text.data() + done, text.size() - done, static_cast<off_t>(done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    done += static_cast<std::size_t>(count);
  }
  return text;
}

}  // namespace loadstone
