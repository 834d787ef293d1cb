#include "storage/whole_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <optional>

#include "base/only_errors.h"
#include "loadstone/error.h"
#include "storage/descriptor.h"
#include "storage/new_file.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

namespace fs = std::filesystem;

constexpr const char* cannot_write = "the system cannot write the file";

// Returns true for names of open descriptors, whose readers would not notice a renamed file.
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

// Returns true if the folder allows no new file, or if the file cannot be replaced by renaming
// because it is a mount point.
bool is_of_the_folder(const Error& error) noexcept {
  return error.code() == "io.denied" || error.where().system_error == EBUSY;
}

std::optional<FileStatus> older_at(const std::string& target, const std::string& path,
                                   WritableStorage& storage) {
  try {
    return storage.status(target, true);
  } catch (const Error& error) {
    if (error.where().system_error == 0) throw;
    fail_write(error.where().system_error, cannot_write, path);
  }
}

void write_whole(const std::string& path, std::string_view text, WritableStorage& storage) {
  require_local(path);
  if (path.empty() || path.find('\0') != std::string::npos) fail_write(EINVAL, cannot_write, path);
  // Follows links, even if their target does not exist yet.
  const std::string target = storage.real_path(path);
  const auto older = older_at(target, path, storage);
  if (names_a_descriptor(path) || names_a_descriptor(target) ||
      (older && older->kind != EntryKind::file)) {
    return write_in_place(path, text);
  }
  if (older && ::access(target.c_str(), W_OK) != 0) fail_write(errno, cannot_write, path);
  const fs::path folder = fs::path(target).parent_path();
  try {
    storage.write_whole(target, (folder / unique_part_name()).string(), text,
                        older ? std::optional(older->permissions) : std::nullopt);
  } catch (const Error& error) {
    if (older && is_of_the_folder(error)) return write_in_place(target, text);
    Where where = error.where();
    where.path = path;  // the caller's path instead of the temporary name
    throw Error(error.code(), cannot_write, std::move(where));
  }
}

}  // namespace

void write_whole_file(const std::string& path, std::string_view text, WritableStorage& storage) {
  return only_errors([&] { return write_whole(path, text, storage); });
}

}  // namespace loadstone
