// Requests bytes of files before they are read, while other bytes are processed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "loadstone/byte_range.h"
#include "loadstone/storage.h"

namespace loadstone {

// Wraps the shards of one run. Each read asks the system for the next planned bytes, so that a disk
// has work while readers copy. Skips bytes that are cached or not planned. Thread-safe.
class ReadAhead {
 public:
  // `reads`: the planned reads, in file order. `bytes_ahead`: distance ahead of the readers, at
  // most 1 GiB; 0: no requests. Sources may be null if nothing is read.
  ReadAhead(std::vector<ShardRange> reads, std::span<const std::shared_ptr<ByteSource>> shards,
            std::uint64_t bytes_ahead);
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Sources to read from instead of the shards; they live as long as this object.
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_;
  }
  // Requested bytes that the page cache lacked.
  [[nodiscard]] std::uint64_t bytes_asked() const noexcept { return bytes_asked_; }

 private:
  class Source;

  void reach(std::uint32_t shard, ByteRange bytes) noexcept;
  [[nodiscard]] std::uint64_t position(std::uint32_t shard, std::uint64_t offset) const noexcept;
  void ask(std::uint64_t begin, std::uint64_t end) noexcept;

  std::vector<ShardRange> reads_;
  std::vector<std::uint64_t> ends_;  // of each range, among all bytes that are read
  std::vector<std::shared_ptr<ByteSource>> shards_;
  std::vector<std::shared_ptr<ByteSource>> sources_;
  const std::uint64_t bytes_ahead_;
  std::vector<std::atomic<bool>> asked_;  // by step of these bytes
  std::atomic<std::uint64_t> bytes_asked_ = 0;
};

}  // namespace loadstone
