// A shard as memory, for tensors that are handed out as views of the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "loadstone/catalog.h"

namespace loadstone {

// A file, mapped privately: writes change this process's copy of the page and never the file. The
// file must not change while this object lives: changes may become visible, and access beyond a
// truncated end kills the process. Thread-safe while nobody writes to the memory.
class MappedShard {
 public:
  // Opens the file again and checks on the open descriptor that it is the shard: Error
  // "io.changed". Else the errors of Storage::open, and "memory.host".
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
