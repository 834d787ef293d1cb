// Maps a shard into memory, for tensors that are views of the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "loadstone/catalog.h"

namespace loadstone {

// A private mapping of a file: a write changes this process's copy of the page, and never the file.
// The file must not change while this object lives. A change may become visible, and an access
// beyond a truncated end kills the process. Thread-safe while no thread writes to the memory.
class MappedShard {
 public:
  // Opens the file again, and checks through the open descriptor that the file is the same shard.
  // Throws Error "io.changed" if the file differs, the errors of Storage::open, and "memory.host".
  [[nodiscard]] static std::shared_ptr<MappedShard> open(const Shard& shard);
  MappedShard(const MappedShard&) = delete;
  MappedShard& operator=(const MappedShard&) = delete;
  ~MappedShard();

  // Throws Error "plan.box" if the range exceeds the file.
  [[nodiscard]] std::span<std::byte> bytes(std::uint64_t offset_begin,
                                           std::uint64_t offset_end) const;

 private:
  MappedShard(std::byte* data, std::uint64_t size) : data_(data), size_(size) {}

  std::byte* data_;
  std::uint64_t size_;
};

}  // namespace loadstone
