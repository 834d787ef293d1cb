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

// Keeps the descriptors that were used last, at most a quarter of those that the process may have
// (RLIMIT_NOFILE, asked for again each time) and 256. Where the system has none left all the same,
// idle ones are closed, and those in use are waited for. Thread-safe, and usable in a child after
// fork().
class DescriptorPool {
 public:
  static constexpr std::size_t open_max = 256;

  // The one of this process.
  [[nodiscard]] static DescriptorPool& instance();

  DescriptorPool() = default;
  DescriptorPool(const DescriptorPool&) = delete;
  DescriptorPool& operator=(const DescriptorPool&) = delete;

  // open(2) for reading; makes room where there is none. -1 and errno where it fails.
  [[nodiscard]] int open_file(const char* path, int flags = 0) noexcept;

  // The file's descriptor, which stays open until it is given back. Opens the file again where it
  // has none: Error "io.changed" where another file stands there by now, or none.
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
  // With the mutex held.
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
