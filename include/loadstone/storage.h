// The one seam to the operating system: where bytes come from and where they go.
//
// The catalog reads headers, execute() reads data and everything that looks at files or writes them
// does so through these interfaces only, so tests can log every access, inject failures at each of
// them, and keep files in memory. What an implementation throws is an Error; another exception
// becomes Error "internal".
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

// Tells whether a file is still the one that was opened: all of it must be equal within one run. A
// storage that has no such thing leaves a member 0.
struct FileIdentity {
  std::uint64_t bytes = 0;
  std::int64_t modified_ns = 0;  // since the epoch
  std::int64_t changed_ns = 0;   // of the file's status: moves with every write, and cannot be set
  std::uint64_t inode = 0;
  std::uint64_t device = 0;  // the file system that numbers the inodes
  std::string version = {};  // of a file on another machine: the ETag, else its time; else empty

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

// One open file. Thread-safe: any number of threads may read at once.
class LOADSTONE_API ByteSource {
 public:
  virtual ~ByteSource() = default;
  [[nodiscard]] virtual const std::string& path() const noexcept = 0;
  // As it is now (a new fstat), not as it was when opened.
  // Where each read tells whether the file is another by now ("io.changed"), as when opened.
  [[nodiscard]] virtual FileIdentity identity() const = 0;
  // How many reads are best under way at a time, for files that make each one wait; 0: as many as
  // there are threads for files of this machine.
  [[nodiscard]] virtual unsigned reads_at_once() const noexcept { return 0; }
  // Whether its bytes come from another machine: such a file is never mapped.
  [[nodiscard]] virtual bool is_on_network() const { return false; }
  // Fills the pieces one after the other from consecutive bytes at `offset`, all of them or throws
  // Error "io.read", or "io.short_read" where the file ends early.
  virtual void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) = 0;

  void read(std::uint64_t offset, std::span<std::byte> piece) { read(offset, {&piece, 1}); }

  // A hint: these bytes are read soon, so those that the page cache lacks may be fetched meanwhile.
  // Does not wait for them. Returns for how many bytes the system was asked.
  virtual std::uint64_t prefetch(std::uint64_t /*offset*/, std::uint64_t /*bytes*/) noexcept {
    return 0;
  }
  // How much of the file the system's page cache holds, from 0 to 1; none where that is not known.
  [[nodiscard]] virtual std::optional<double> cached_share() const { return std::nullopt; }
  // A hint: nobody reads these bytes again soon, so their pages may leave the cache.
  virtual void release(std::uint64_t /*offset*/, std::uint64_t /*bytes*/) noexcept {}
};

enum class EntryKind : std::uint8_t { file, folder, link, other };

// The entry of a name, as it is now.
struct FileStatus {
  EntryKind kind = EntryKind::other;
  FileIdentity identity{};
  std::uint64_t bytes_on_disk = 0;
  std::uint32_t permissions = 0;
};

enum class Reserve : std::uint8_t {
  all,      // every block now: mapped memory cannot tell that the disk is full
  if_cheap  // where the file system does it at once; else only the file's size is set
};

// One new file. Thread-safe: any number of threads may write at once, and to the mapped memory.
//
// Implementations are the functions whose names begin with try_: one attempt each, which returns
// what the system's call would: an error number of errno.h, 0 for success. The others are the
// rules above them, the same for all: interrupted calls are made again, short writes go on, and an
// error becomes Error "io.no_space", "io.denied" or "io.write" with the path.
class LOADSTONE_API FileSink {
 public:
  virtual ~FileSink() = default;
  [[nodiscard]] virtual const std::string& path() const noexcept = 0;

  virtual int try_reserve(std::uint64_t byte_count, Reserve how) = 0;
  // How many of the bytes were written, at least one; or a negative error number.
  virtual std::int64_t try_write(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  // The whole file as memory that lives as long as the sink. The file is reserved before.
  virtual int try_map(std::uint64_t byte_count, std::byte*& memory) = 0;
  // Brings all that was written, to the mapped memory too, to the disk.
  virtual int try_sync() = 0;
  // A hint: what was written goes to the disk soon, and its pages may leave the page cache.
  virtual void release() noexcept {}

  void reserve(std::uint64_t byte_count, Reserve how);
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  [[nodiscard]] std::span<std::byte> map(std::uint64_t byte_count);
  void sync();
};

enum class LockMode : std::uint8_t { shared, exclusive };
enum class LockResult : std::uint8_t { taken, busy, unsupported };

// A file or folder that processes lock to keep out of each other's way. Unlocked at its end, and
// when the process ends, however it does.
class LOADSTONE_API FileLock {
 public:
  virtual ~FileLock() = default;
  [[nodiscard]] virtual const std::string& path() const noexcept = 0;
  // EWOULDBLOCK where another one has it. In place of a lock that is held already.
  virtual int try_take(LockMode mode, bool waits) = 0;
  // Whether the path still leads here: who had the lock before may have removed the file.
  [[nodiscard]] virtual bool is_named() const = 0;

  // "unsupported" where the file system has no locks: then nobody is kept out.
  [[nodiscard]] LockResult take(LockMode mode, bool waits);
};

// This machine's file system, which is looked at and written to. Thread-safe. For names that begin
// with try_, and for errors, see FileSink.
class LOADSTONE_API WritableStorage {
 public:
  virtual ~WritableStorage() = default;

  virtual int try_status(const std::string& path, bool follows_link, FileStatus& status) = 0;
  // Appends names (not paths), in any order; those up to a problem too.
  virtual int try_list(const std::string& folder, std::vector<std::string>& names) = 0;
  // Opens a regular file to be read: ELOOP for a link, EISDIR for a folder, ENXIO for the rest.
  virtual int try_open(const std::string& path, std::shared_ptr<ByteSource>& file) = 0;
  // The absolute path with links resolved as far as it exists.
  virtual int try_resolve(const std::string& path, std::string& real) = 0;
  virtual int try_free_bytes(const std::string& folder, std::uint64_t& bytes) = 0;
  virtual int try_permit(const std::string& path, std::uint32_t permissions) = 0;
  // A file that was not there; links are not followed.
  virtual int try_create(const std::string& path, std::unique_ptr<FileSink>& file) = 0;
  virtual int try_make_folder(const std::string& path) = 0;
  // One step: what had the name before is gone.
  virtual int try_rename(const std::string& from, const std::string& to) = 0;
  // One step; EINVAL or ENOSYS where the file system cannot do it.
  virtual int try_exchange(const std::string& a, const std::string& b) = 0;
  virtual int try_link(const std::string& from, const std::string& to) = 0;
  virtual int try_remove(const std::string& path) = 0;
  virtual int try_remove_folder(const std::string& path) = 0;
  virtual int try_sync_folder(const std::string& path) = 0;
  // Opens a file or folder to be locked; a file that is not there is made.
  virtual int try_open_lock(const std::string& path, std::unique_ptr<FileLock>& lock) = 0;

  // None where nothing has the name. Throws Error "io.denied", "io.open".
  [[nodiscard]] std::optional<FileStatus> status(const std::string& path,
                                                 bool follows_link = false);
  // Sorted names; none if the folder is missing or access is denied. Throws Error "io.read".
  [[nodiscard]] std::vector<std::string> list(const std::string& folder);
  // Like try_open().
  [[nodiscard]] int open(const std::string& path, std::shared_ptr<ByteSource>& file);
  // At most so many bytes of a regular file; none where there is no such file, or access is denied.
  // Throws Error "io.read".
  [[nodiscard]] std::optional<std::string> read_begin(const std::string& path,
                                                      std::size_t bytes_max);
  // The path itself where the system cannot resolve it.
  [[nodiscard]] std::string real_path(const std::string& path);
  // None if the system does not report it.
  [[nodiscard]] std::optional<std::uint64_t> free_bytes(const std::string& folder);
  // False: they stay as they were.
  bool permit(const std::string& path, std::uint32_t permissions) noexcept;
  [[nodiscard]] std::unique_ptr<FileSink> create(const std::string& path);
  // False: it was there already.
  bool make_folder(const std::string& path);
  void rename(const std::string& from, const std::string& to);
  // False: the file system cannot do it.
  [[nodiscard]] bool exchange(const std::string& a, const std::string& b);
  void link(const std::string& from, const std::string& to);
  // False: nothing was removed, for whatever reason. Cleaning up never fails.
  bool remove(const std::string& path) noexcept;
  bool remove_folder(const std::string& path) noexcept;
  // So that the names in it are on the disk too.
  void sync_folder(const std::string& path);
  // Null where the folder above is not there.
  [[nodiscard]] std::unique_ptr<FileLock> open_lock(const std::string& path);
  // A whole file under its name, on the disk, or nothing; `unfinished` is its path until then.
  void write_whole(const std::string& path, const std::string& unfinished, std::string_view text,
                   std::optional<std::uint32_t> permissions = {});
};

// The file system. Thread-safe.
class LOADSTONE_API Storage {
 public:
  virtual ~Storage() = default;
  // Opens a regular file for reading; never blocks on a pipe. Throws Error: "io.not_found",
  // "io.denied", "io.open", "io.not_regular".
  [[nodiscard]] virtual std::shared_ptr<ByteSource> open(const std::string& path) = 0;
  // As open(), for a reader that knows nothing of the file yet. Where a file of another machine
  // was opened before, open() may go on with what it knows, and reads tell that it has changed.
  [[nodiscard]] virtual std::shared_ptr<ByteSource> open_anew(const std::string& path);
  // The entry at `path`, links followed, so never a link. Throws Error "io.not_found",
  // "io.denied".
  [[nodiscard]] virtual EntryKind kind(const std::string& path) = 0;
  // Names (not paths) in a folder, sorted. Throws Error "io.not_found", "io.denied", "io.read".
  [[nodiscard]] virtual std::vector<std::string> list(const std::string& folder) = 0;
  // The path with all links resolved. Throws Error "io.not_found", "io.denied".
  [[nodiscard]] virtual std::string resolve(const std::string& path) = 0;
  // Where files are written; by default the machine's own file system.
  [[nodiscard]] virtual WritableStorage& writable();
};

// The machine's own file system: pread into the caller's memory. It lives as long as the program.
[[nodiscard]] LOADSTONE_API Storage& local_storage();

}  // namespace loadstone
