// Implements the rules above the system calls: retries, and the mapping of errors.
#include <algorithm>
#include <cerrno>
#include <exception>
#include <utility>

#include "base/only_errors.h"
#include "loadstone/error.h"
#include "loadstone/storage.h"
#include "storage/new_file.h"
#include "storage/remote_path.h"

namespace loadstone {

namespace {

// Repeats the call until it is not interrupted by a signal.
template <typename Call>
int repeated(const Call& call) {
  int problem = EINTR;
  while (problem == EINTR) problem = call();
  return problem;
}

bool is_absent_or_denied(int problem) noexcept {
  return problem == ENOENT || problem == ENOTDIR || problem == EACCES || problem == EPERM;
}

// Returns true if the path exists but is not a regular file, or cannot be a path.
bool is_no_file(int problem) noexcept {
  return problem == ELOOP || problem == EISDIR || problem == ENXIO || problem == ENODEV ||
         problem == EINVAL;
}

void require(int problem, const char* message, const std::string& path) {
  if (problem != 0) fail_write(problem, message, path);
}

template <typename Call>
bool quietly(const Call& call) noexcept {
  try {
    return repeated(call) == 0;
  } catch (...) {
    return false;
  }
}

}  // namespace

void FileSink::reserve(std::uint64_t byte_count, Reserve how) {
  check_file_limit(byte_count, path());
  require(repeated([&] { return try_reserve(byte_count, how); }),
          "the system cannot reserve space for the file", path());
}

void FileSink::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::int64_t count = try_write(offset, bytes);
    if (count == -EINTR) continue;
    if (count == -EFBIG) check_file_limit(offset + bytes.size(), path());
    if (count <= 0) {
      fail_write(count < 0 ? static_cast<int>(-count) : ENOSPC, "the system cannot write the file",
                 path());
    }
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    offset += static_cast<std::uint64_t>(count);
  }
}

std::span<std::byte> FileSink::map(std::uint64_t byte_count) {
  std::byte* memory = nullptr;
  if (byte_count == 0) return {};
  require(repeated([&] { return try_map(byte_count, memory); }),
          "the system cannot map the file into memory", path());
  return {memory, static_cast<std::size_t>(byte_count)};
}

void FileSink::sync() {
  require(repeated([&] { return try_sync(); }), "the system cannot flush the file to the disk",
          path());
}

LockResult FileLock::take(LockMode mode, bool waits) {
  return only_errors([&]() -> LockResult {
    const int problem = repeated([&] { return try_take(mode, waits); });
    if (problem == 0) return LockResult::taken;
    if (problem == EWOULDBLOCK) return LockResult::busy;
    // EBADF: network file systems lock only files that are open for writing, which folders never
    // are.
    if (problem == ENOLCK || problem == EOPNOTSUPP || problem == ENOSYS || problem == EBADF) {
      return LockResult::unsupported;
    }
    fail_write(problem, "the system cannot lock the file", path());
  });
}

std::optional<FileStatus> WritableStorage::status(const std::string& path, bool follows_link) {
  FileStatus found;
  const int problem = repeated([&] { return try_status(path, follows_link, found); });
  if (problem == 0) return found;
  if (problem == ENOENT || problem == ENOTDIR) return std::nullopt;
  throw Error(problem == EACCES ? "io.denied" : "io.open", "the system cannot inspect the target",
              {.path = path, .system_error = problem});
}

std::vector<std::string> WritableStorage::list(const std::string& folder) {
  std::vector<std::string> names;
  const int problem = repeated([&] {
    names.clear();
    return try_list(folder, names);
  });
  if (problem != 0 && !is_absent_or_denied(problem)) {
    throw Error("io.read", "the system cannot list the folder",
                {.path = folder, .system_error = problem});
  }
  std::ranges::sort(names);
  return names;
}

int WritableStorage::open(const std::string& path, std::shared_ptr<ByteSource>& file) {
  return repeated([&] { return try_open(path, file); });
}

std::optional<std::string> WritableStorage::read_begin(const std::string& path,
                                                       std::size_t bytes_max) {
  std::shared_ptr<ByteSource> file;
  const int problem = open(path, file);
  if (is_absent_or_denied(problem) || is_no_file(problem)) return std::nullopt;
  if (problem != 0) {
    throw Error("io.read", "the system cannot read the file",
                {.path = path, .system_error = problem});
  }
  std::string text(std::min<std::uint64_t>(bytes_max, file->identity().bytes), '\0');
  file->read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

std::string WritableStorage::real_path(const std::string& path) {
  std::string real;
  const int problem = repeated([&] { return try_resolve(path, real); });
  return problem != 0 || real.empty() ? path : real;
}

std::optional<std::uint64_t> WritableStorage::free_bytes(const std::string& folder) {
  std::uint64_t bytes = 0;
  const int problem = repeated([&] { return try_free_bytes(folder, bytes); });
  return problem == 0 ? std::optional(bytes) : std::nullopt;
}

bool WritableStorage::permit(const std::string& path, std::uint32_t permissions) noexcept {
  return quietly([&] { return try_permit(path, permissions); });
}

std::unique_ptr<FileSink> WritableStorage::create(const std::string& path) {
  return only_errors([&]() -> std::unique_ptr<FileSink> {
    require_local(path);
    std::unique_ptr<FileSink> file;
    require(repeated([&] { return try_create(path, file); }), "the system cannot create the file",
            path);
    return file;
  });
}

bool WritableStorage::make_folder(const std::string& path) {
  require_local(path);
  const int problem = repeated([&] { return try_make_folder(path); });
  if (problem == EEXIST) return false;
  require(problem, "the system cannot create the folder", path);
  return true;
}

void WritableStorage::rename(const std::string& from, const std::string& to) {
  require(repeated([&] { return try_rename(from, to); }),
          "the system cannot rename the file to its final name", to);
}

bool WritableStorage::exchange(const std::string& a, const std::string& b) {
  const int problem = repeated([&] { return try_exchange(a, b); });
  if (problem == EINVAL || problem == ENOSYS) return false;
  require(problem, "the system cannot exchange the old file or folder for the new one", b);
  return true;
}

void WritableStorage::link(const std::string& from, const std::string& to) {
  require(repeated([&] { return try_link(from, to); }), "the system cannot rename the file", from);
}

bool WritableStorage::remove(const std::string& path) noexcept {
  return quietly([&] { return try_remove(path); });
}

bool WritableStorage::remove_folder(const std::string& path) noexcept {
  return quietly([&] { return try_remove_folder(path); });
}

void WritableStorage::sync_folder(const std::string& path) {
  const int problem = repeated([&] { return try_sync_folder(path); });
  if (problem == EINVAL) return;  // unsupported for folders, whose renames are durable anyway
  require(problem, "the system cannot flush the folder to the disk", path);
}

std::unique_ptr<FileLock> WritableStorage::open_lock(const std::string& path) {
  return only_errors([&]() -> std::unique_ptr<FileLock> {
    require_local(path);
    std::unique_ptr<FileLock> lock;
    const int problem = repeated([&] { return try_open_lock(path, lock); });
    if (problem == ENOENT) return nullptr;
    require(problem, "the system cannot open the lock file", path);
    return lock;
  });
}

void WritableStorage::write_whole(const std::string& path, const std::string& unfinished,
                                  std::string_view text, std::optional<std::uint32_t> permissions) {
  only_errors([&] {
    const auto file = create(unfinished);
    try {
      file->write(0, std::as_bytes(std::span(text)));
      if (permissions) permit(unfinished, *permissions);
      file->sync();
      rename(unfinished, path);
    } catch (...) {
      remove(unfinished);
      throw;
    }
  });
}

std::shared_ptr<ByteSource> Storage::open_anew(const std::string& path) { return open(path); }
WritableStorage& Storage::writable() { return local_storage().writable(); }

}  // namespace loadstone
