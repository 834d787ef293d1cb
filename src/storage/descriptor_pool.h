// Keeps descriptors of files open while they are used or likely to be used again, within the number
// of descriptors that the process can spare.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "loadstone/storage.h"

namespace loadstone {

class DescriptorPool;

// A file to read from, which the pool closes and opens again if necessary. Thread-safe.
class PooledFile {
 public:
  // Takes ownership of an open descriptor. `identity`: identity of the open file.
  PooledFile(DescriptorPool& pool, std::string path, int descriptor, FileIdentity identity);
  PooledFile(const PooledFile&) = delete;
  PooledFile& operator=(const PooledFile&) = delete;
  ~PooledFile();

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  friend class DescriptorPool;

  DescriptorPool& pool_;
  const std::string path_;
  const FileIdentity identity_;  // of the first open; the pool never opens a different file instead
  // The pool's mutex guards this member and all that follow.
  int descriptor_ = -1;
  unsigned users_ = 0;
  std::uint64_t used_at_ = 0;
};

// Keeps the most recently used descriptors open: at most 256, and at most a quarter of the
// process's limit (RLIMIT_NOFILE, queried each time). If the process still runs out of descriptors,
// the pool closes idle ones and waits for those in use. Thread-safe, also in a child after fork().
class DescriptorPool {
 public:
  static constexpr std::size_t open_max = 256;

  // Returns the pool of this process.
  [[nodiscard]] static DescriptorPool& instance();

  DescriptorPool() = default;
  DescriptorPool(const DescriptorPool&) = delete;
  DescriptorPool& operator=(const DescriptorPool&) = delete;

  // Calls open(2) for reading. If the process has too many open files, closes idle ones. Returns -1
  // and sets errno on failure.
  [[nodiscard]] int open_file(const char* path, int flags = 0) noexcept;

  // Keeps a file's descriptor open during its lifetime. Opens the file again if necessary. Throws
  // Error "io.changed" if the file is missing or was replaced.
  class Use {
   public:
    explicit Use(PooledFile& file) : file_(file), descriptor_(file.pool_.take(file)) {}
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() { file_.pool_.give_back(file_); }
    [[nodiscard]] int descriptor() const noexcept { return descriptor_; }

   private:
    PooledFile& file_;
    int descriptor_;
  };

  // Returns the number of open descriptors in the pool.
  [[nodiscard]] std::size_t open_count();

 private:
  friend class PooledFile;

  [[nodiscard]] int take(PooledFile& file);
  void give_back(PooledFile& file) noexcept;
  void add(PooledFile& file, int descriptor);
  void remove(PooledFile& file) noexcept;
  // Precondition: the caller holds the mutex.
  void adopt(PooledFile& file, int descriptor) noexcept;
  [[nodiscard]] bool close_idle() noexcept;
  void close_beyond_limit() noexcept;
  void close(PooledFile& file) noexcept;

  [[nodiscard]] bool make_room(unsigned attempt) noexcept;
  void forget_users() noexcept;

  std::mutex mutex_;
  std::vector<PooledFile*> files_;  // all existing files; mutex_ guards this and all that follows
  std::size_t open_ = 0;            // number of files with a descriptor
  std::size_t used_ = 0;            // number of files in use
  std::size_t limit_ = 0;           // limit on open_, updated when a file is opened
  std::uint64_t clock_ = 0;
};

}  // namespace loadstone
