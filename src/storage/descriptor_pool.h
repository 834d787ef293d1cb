// Descriptors of files that are read: open while they are used or likely to be used again, and
// never more of them than the process can spare.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "loadstone/storage.h"

namespace loadstone {

class DescriptorPool;

// One file to read from, whether it has a descriptor at the moment or not. Thread-safe.
class PooledFile {
 public:
  // Takes over an open descriptor, with the identity that it has.
  PooledFile(DescriptorPool& pool, std::string path, int descriptor, FileIdentity identity);
  PooledFile(const PooledFile&) = delete;
  PooledFile& operator=(const PooledFile&) = delete;
  ~PooledFile();

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  friend class DescriptorPool;

  DescriptorPool& pool_;
  const std::string path_;
  const FileIdentity identity_;  // when it was opened first: it is opened again as this file only
  // Guarded by the pool's mutex, as all that follows.
  int descriptor_ = -1;
  unsigned users_ = 0;
  std::uint64_t used_at_ = 0;
};

// Caches the most recently used descriptors, at most 256 and a quarter of the process's limit
// (RLIMIT_NOFILE, queried each time). If the system runs out of them anyway, it closes idle ones
// and waits for those in use. Thread-safe, also in a child after fork().
class DescriptorPool {
 public:
  static constexpr std::size_t open_max = 256;

  // The pool of this process.
  [[nodiscard]] static DescriptorPool& instance();

  DescriptorPool() = default;
  DescriptorPool(const DescriptorPool&) = delete;
  DescriptorPool& operator=(const DescriptorPool&) = delete;

  // open(2) for reading; frees descriptors if necessary. Returns -1 and sets errno on failure.
  [[nodiscard]] int open_file(const char* path, int flags = 0) noexcept;

  // The file's descriptor, which stays open until it is released. Opens the file again if
  // necessary: Error "io.changed" if it is missing or was replaced.
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

  // Descriptors that are open in the pool.
  [[nodiscard]] std::size_t open_count();

 private:
  friend class PooledFile;

  [[nodiscard]] int take(PooledFile& file);
  void give_back(PooledFile& file) noexcept;
  void add(PooledFile& file, int descriptor);
  void remove(PooledFile& file) noexcept;
  // Requires the mutex.
  void adopt(PooledFile& file, int descriptor) noexcept;
  [[nodiscard]] bool close_idle() noexcept;
  void close_beyond_limit() noexcept;
  void close(PooledFile& file) noexcept;

  [[nodiscard]] bool make_room(unsigned attempt) noexcept;
  void forget_users() noexcept;

  std::mutex mutex_;
  std::vector<PooledFile*> files_;  // guarded by mutex_, as all that follows: all that live
  std::size_t open_ = 0;            // those with a descriptor
  std::size_t used_ = 0;            // those with users
  std::size_t limit_ = 0;           // of open_, when the last one was opened
  std::uint64_t clock_ = 0;
};

}  // namespace loadstone
