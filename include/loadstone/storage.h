// The one seam to the operating system: where bytes come from.
//
// The catalog reads headers and execute() reads data through these two interfaces only, so tests
// can log every access, inject failures, and keep files in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace loadstone {

// Tells whether a file is still the one that was opened: all of it must be equal within one run. A
// storage that has no such thing leaves a member 0.
struct FileIdentity {
  std::uint64_t bytes = 0;
  std::int64_t modified_ns = 0;  // since the epoch
  std::int64_t changed_ns = 0;   // of the file's status: moves with every write, and cannot be set
  std::uint64_t inode = 0;
  std::uint64_t device = 0;  // the file system that numbers the inodes

  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
};

// One open file. Thread-safe: any number of threads may read at once.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  [[nodiscard]] virtual const std::string& path() const noexcept = 0;
  // As it is now (a new fstat), not as it was when opened.
  [[nodiscard]] virtual FileIdentity identity() const = 0;
  // Fills the pieces one after the other from consecutive bytes at `offset`, all of them or throws
  // Error "io.read", or "io.short_read" where the file ends early.
  virtual void read(std::uint64_t offset, std::span<const std::span<std::byte>> pieces) = 0;

  void read(std::uint64_t offset, std::span<std::byte> piece) { read(offset, {&piece, 1}); }
};

enum class EntryKind : std::uint8_t { file, folder, other };

// The file system. Thread-safe.
class Storage {
 public:
  virtual ~Storage() = default;
  // Opens a regular file for reading; never blocks on a pipe. Throws Error: "io.not_found",
  // "io.denied", "io.open", "io.not_regular".
  [[nodiscard]] virtual std::shared_ptr<ByteSource> open(const std::string& path) = 0;
  // What stands at `path`, links followed. Throws Error "io.not_found", "io.denied".
  [[nodiscard]] virtual EntryKind kind(const std::string& path) = 0;
  // Names (not paths) in a folder, sorted.
  [[nodiscard]] virtual std::vector<std::string> list(const std::string& folder) = 0;
  // The path with all links resolved.
  [[nodiscard]] virtual std::string resolve(const std::string& path) = 0;
};

// The machine's own file system: pread into the caller's memory.
[[nodiscard]] Storage& local_storage();

}  // namespace loadstone
