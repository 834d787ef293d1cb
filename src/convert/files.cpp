#include "convert/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "loadstone/error.h"
#include "receipt/receipt_file.h"
#include "storage/new_file.h"

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

bool is_receipt_file(const std::string& path) {
  const auto begin = path.ends_with(receipt_file_name) ? read_begin(path, 100) : std::nullopt;
  return begin && begin->find("loadstone-receipt") != std::string::npos;
}

}  // namespace loadstone
