#include "storage/whole_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <system_error>

#include "base/only_errors.h"
#include "loadstone/error.h"
#include "storage/new_file.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

namespace fs = std::filesystem;

constexpr const char* cannot_write = "cannot write the file";

// Links followed, those that lead nowhere yet too.
std::string followed(const std::string& path) {
  std::error_code problem;
  const fs::path real = fs::weakly_canonical(path, problem);
  return problem || real.empty() ? path : real.string();
}

// Names there are of open descriptors: a file that is renamed to one reaches nobody.
bool names_a_descriptor(const std::string& path) {
  const std::string name = fs::path(path).lexically_normal().string();
  return name.starts_with("/dev/fd/") || name.starts_with("/proc/") || name == "/dev/stdin" ||
         name == "/dev/stdout" || name == "/dev/stderr";
}

void write_in_place(const std::string& path, std::string_view text) {
  const Descriptor file(::open(path.c_str(), O_WRONLY | O_TRUNC | O_NOCTTY | O_CLOEXEC));
  if (file.get() < 0) fail_write(errno, cannot_write, path);
  while (!text.empty()) {
    const ssize_t count = ::write(file.get(), text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_write(errno, cannot_write, path);
    text.remove_prefix(static_cast<std::size_t>(count));
  }
}

// The folder takes no new file, or the name cannot move to one: a mount point.
bool is_of_the_folder(const Error& error) noexcept {
  return error.code() == "io.denied" || error.where().system_error == EBUSY;
}

void replace(WritableStorage& storage, const std::string& path, const std::string& unfinished,
             std::string_view text, std::optional<mode_t> mode) {
  const std::unique_ptr<FileSink> file = storage.create(unfinished);
  try {
    file->write(0, std::as_bytes(std::span(text)));
    if (mode) static_cast<void>(::chmod(unfinished.c_str(), *mode & 07777));
    file->sync();
    storage.rename(unfinished, path);
  } catch (...) {
    storage.remove(unfinished);
    throw;
  }
}

void write_whole(const std::string& path, std::string_view text, WritableStorage& storage) {
  require_local(path);
  if (path.empty() || path.find('\0') != std::string::npos) fail_write(EINVAL, cannot_write, path);
  const std::string target = followed(path);
  struct stat status {};
  const bool exists = ::stat(target.c_str(), &status) == 0;
  if (names_a_descriptor(path) || names_a_descriptor(target) ||
      (exists && !S_ISREG(status.st_mode))) {
    return write_in_place(path, text);
  }
  if (exists && ::access(target.c_str(), W_OK) != 0) fail_write(errno, cannot_write, path);
  const fs::path folder = fs::path(target).parent_path();
  try {
    replace(storage, target, (folder / unique_part_name()).string(), text,
            exists ? std::optional(status.st_mode) : std::nullopt);
  } catch (const Error& error) {
    if (exists && is_of_the_folder(error)) return write_in_place(target, text);
    Where where = error.where();
    where.path = path;  // nobody knows the temporary name
    throw Error(error.code(), cannot_write, std::move(where));
  }
}

}  // namespace

void write_whole_file(const std::string& path, std::string_view text, WritableStorage& storage) {
  return only_errors([&] { return write_whole(path, text, storage); });
}

}  // namespace loadstone
