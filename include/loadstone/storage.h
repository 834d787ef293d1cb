// The interface to the operating system: files to read and files to write.
//
// The catalog reads headers, execute() reads data, and all other code inspects and writes files
// only through these interfaces. Tests can therefore log every access, inject failures everywhere,
// and keep files in memory. Implementations throw Error; any other exception becomes Error
// "internal".
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loadstone/export.h"

namespace loadstone {

// Identifies a file, to detect a change: all members must stay equal during a run. A storage that
// does not know a member leaves it 0.
struct FileIdentity {
  std::uint64_t bytes = 0;
  std::int64_t modified_ns = 0;  // since the epoch
  std::int64_t changed_ns = 0;   // ctime: changes with every write, and cannot be set
  std::uint64_t inode = 0;
  std::uint64_t device = 0;  // the file system that assigns the inodes
  std::string version = {};  // of a remote file: the ETag, or else its time; otherwise empty

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

// One open file. Thread-safe: any number of threads may read at once.
class LOADSTONE_API ByteSource {
 public:
  virtual ~ByteSource() = default;
  [[nodiscard]] virtual const std::string& path() const noexcept = 0;
  // Returns the current identity (a new fstat). If each read detects a change of the file
  // ("io.changed"), may return the identity from open() instead.
  [[nodiscard]] virtual FileIdentity identity() const = 0;
  // Returns the best number of concurrent reads for a file with high latency; 0, for local files:
  // one read per thread.
  [[nodiscard]] virtual unsigned reads_at_once() const noexcept { return 0; }
  // Returns true if the bytes come from another machine; such a file is never mapped.
  [[nodiscard]] virtual bool is_on_network() const { return false; }
  // Fills the pieces in order from consecutive bytes at `offset`, completely or not at all. Throws
  // Error "io.read", or "io.short_read" if the file is too short.
  virtual void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) = 0;

  void read(std::uint64_t offset, std::span<std::byte> piece) { read(offset, {&piece, 1}); }

  // Hint: these bytes will be read soon, so the system may fetch them into the page cache. Does not
  // wait. Returns the number of bytes requested from the system.
  virtual std::uint64_t prefetch(std::uint64_t /*offset*/, std::uint64_t /*bytes*/) noexcept {
    return 0;
  }
  // Returns the fraction of the file in the system's page cache, 0 to 1; nullopt: unknown.
  [[nodiscard]] virtual std::optional<double> cached_share() const { return std::nullopt; }
  // Hint: these bytes are not read again soon, so their pages may leave the cache.
  virtual void release(std::uint64_t /*offset*/, std::uint64_t /*bytes*/) noexcept {}
};

enum class EntryKind : std::uint8_t { file, folder, link, other };

// Kind, identity and size of the file that a path currently refers to.
struct FileStatus {
  EntryKind kind = EntryKind::other;
  FileIdentity identity{};
  std::uint64_t bytes_on_disk = 0;
  std::uint32_t permissions = 0;
  // True if the path is the root of a mounted file system, even if its parent folder is on the same
  // file system (mount --bind). False if the system does not report this (before Linux 5.8).
  bool is_mount_point = false;
};

enum class Reserve : std::uint8_t {
  all,      // every block now, because a write to mapped memory cannot report a full disk
  if_cheap  // blocks only if the file system reserves them at once; else only sets the file's size
};

// One new file. Thread-safe: any number of threads may write to it, and to its mapped memory.
//
// Implementations override the functions whose names begin with try_. Each such function makes one
// attempt and returns the system call's error number (errno.h), 0 for success. The other functions
// apply the same rules to all implementations: they retry interrupted calls, continue short writes,
// and turn an error number into Error "io.no_space", "io.denied" or "io.write" with the path.
class LOADSTONE_API FileSink {
 public:
  virtual ~FileSink() = default;
  [[nodiscard]] virtual const std::string& path() const noexcept = 0;

  virtual int try_reserve(std::uint64_t byte_count, Reserve how) = 0;
  // Returns the number of bytes written, at least one, or a negated error number.
  virtual std::int64_t try_write(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  // Maps the whole file as memory that lives as long as the sink. Call reserve() first.
  virtual int try_map(std::uint64_t byte_count, std::byte*& memory) = 0;
  // Flushes everything written to disk, including writes to the mapped memory.
  virtual int try_sync() = 0;
  // Hint: write these bytes to disk soon, and let their pages leave the page cache.
  virtual void release() noexcept {}

  void reserve(std::uint64_t byte_count, Reserve how);
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  [[nodiscard]] std::span<std::byte> map(std::uint64_t byte_count);
  void sync();
};

enum class LockMode : std::uint8_t { shared, exclusive };
enum class LockResult : std::uint8_t { taken, busy, unsupported };

// A lock between processes on a file or folder. Released by its destructor, and when the process
// ends for any reason.
class LOADSTONE_API FileLock {
 public:
  virtual ~FileLock() = default;
  [[nodiscard]] virtual const std::string& path() const noexcept = 0;
  // Returns EWOULDBLOCK if another process has the lock. Replaces a lock that this object has.
  virtual int try_take(LockMode mode, bool waits) = 0;
  // Returns true if the path still refers to this file. The previous owner of the lock may have
  // removed the file.
  [[nodiscard]] virtual bool is_named() const = 0;

  // Takes the lock. Returns `unsupported` if the file system has no locks; other processes are then
  // not excluded.
  [[nodiscard]] LockResult take(LockMode mode, bool waits);
};

// This machine's file system, to inspect and to write. Thread-safe. See FileSink for functions
// whose names begin with try_, and for errors.
class LOADSTONE_API WritableStorage {
 public:
  virtual ~WritableStorage() = default;

  virtual int try_status(const std::string& path, bool follows_link, FileStatus& status) = 0;
  // Appends names (not paths) in any order. If an error occurs, keeps the names found before it.
  virtual int try_list(const std::string& folder, std::vector<std::string>& names) = 0;
  // Opens a regular file for reading. Returns ELOOP for a link, EISDIR for a folder, ENXIO for
  // other entries.
  virtual int try_open(const std::string& path, std::shared_ptr<ByteSource>& file) = 0;
  // Sets `real` to the absolute path, with links resolved as far as the path exists.
  virtual int try_resolve(const std::string& path, std::string& real) = 0;
  virtual int try_free_bytes(const std::string& folder, std::uint64_t& bytes) = 0;
  virtual int try_permit(const std::string& path, std::uint32_t permissions) = 0;
  // Creates a new file; does not follow links.
  virtual int try_create(const std::string& path, std::unique_ptr<FileSink>& file) = 0;
  virtual int try_make_folder(const std::string& path) = 0;
  // Renames atomically; replaces an existing file of the new name.
  virtual int try_rename(const std::string& from, const std::string& to) = 0;
  // Exchanges two entries atomically; EINVAL or ENOSYS if the file system does not support it.
  virtual int try_exchange(const std::string& a, const std::string& b) = 0;
  virtual int try_link(const std::string& from, const std::string& to) = 0;
  virtual int try_remove(const std::string& path) = 0;
  virtual int try_remove_folder(const std::string& path) = 0;
  virtual int try_sync_folder(const std::string& path) = 0;
  // Opens a file or folder for locking; creates a missing file.
  virtual int try_open_lock(const std::string& path, std::unique_ptr<FileLock>& lock) = 0;

  // Returns nullopt if the path does not exist. Throws Error "io.denied", "io.open".
  [[nodiscard]] std::optional<FileStatus> status(const std::string& path,
                                                 bool follows_link = false);
  // Returns sorted names; empty if the folder is missing or access is denied. Throws Error
  // "io.read".
  [[nodiscard]] std::vector<std::string> list(const std::string& folder);
  // Same as try_open().
  [[nodiscard]] int open(const std::string& path, std::shared_ptr<ByteSource>& file);
  // Returns up to `bytes_max` bytes from the start of a regular file; nullopt if the file is
  // missing or access is denied. Throws Error "io.read".
  [[nodiscard]] std::optional<std::string> read_begin(const std::string& path,
                                                      std::size_t bytes_max);
  // Returns the path with links resolved, or unchanged if the system cannot resolve it.
  [[nodiscard]] std::string real_path(const std::string& path);
  // Returns nullopt if the system does not report the free space.
  [[nodiscard]] std::optional<std::uint64_t> free_bytes(const std::string& folder);
  // Returns false if the permissions could not be set.
  bool permit(const std::string& path, std::uint32_t permissions) noexcept;
  [[nodiscard]] std::unique_ptr<FileSink> create(const std::string& path);
  // Returns false if the folder already existed.
  bool make_folder(const std::string& path);
  void rename(const std::string& from, const std::string& to);
  // Returns false if the file system does not support it.
  [[nodiscard]] bool exchange(const std::string& a, const std::string& b);
  void link(const std::string& from, const std::string& to);
  // Return false if nothing was removed, for any reason. Never throw, because they clean up.
  bool remove(const std::string& path) noexcept;
  bool remove_folder(const std::string& path) noexcept;
  // Flushes the folder's list of names to disk.
  void sync_folder(const std::string& path);
  // Returns null if the parent folder is missing.
  [[nodiscard]] std::unique_ptr<FileLock> open_lock(const std::string& path);
  // Writes a whole file and flushes it to disk, or leaves nothing. The file is written at
  // `unfinished`, then renamed to `path`.
  void write_whole(const std::string& path, const std::string& unfinished, std::string_view text,
                   std::optional<std::uint32_t> permissions = {});
};

// The file system that checkpoints are read from. Thread-safe.
class LOADSTONE_API Storage {
 public:
  virtual ~Storage() = default;
  // Opens a regular file for reading; never blocks on a pipe. Throws Error: "io.not_found",
  // "io.denied", "io.open", "io.not_regular".
  [[nodiscard]] virtual std::shared_ptr<ByteSource> open(const std::string& path) = 0;
  // Like open(), but looks at the file again. open() may reuse the identity of a remote file that
  // was opened before; reads then detect a change.
  [[nodiscard]] virtual std::shared_ptr<ByteSource> open_anew(const std::string& path);
  // Returns the entry at `path`, following links. Throws Error "io.not_found", "io.denied".
  [[nodiscard]] virtual EntryKind kind(const std::string& path) = 0;
  // Returns the sorted names (not paths) in a folder. Throws Error "io.not_found", "io.denied",
  // "io.read".
  [[nodiscard]] virtual std::vector<std::string> list(const std::string& folder) = 0;
  // Returns the path with all links resolved. Throws Error "io.not_found", "io.denied".
  [[nodiscard]] virtual std::string resolve(const std::string& path) = 0;
  // Throws if the caller has cancelled its reads of this storage. A thread that waits for reads of
  // other threads calls this about 20 times a second.
  virtual void require_wanted() {}
  // Returns the file system for writes; by default this machine's.
  [[nodiscard]] virtual WritableStorage& writable();
};

// Returns this machine's file system, which reads with pread into the caller's memory. It lives as
// long as the program.
[[nodiscard]] LOADSTONE_API Storage& local_storage();

}  // namespace loadstone
