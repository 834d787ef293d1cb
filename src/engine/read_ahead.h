// Asks the system to read file bytes in advance, while threads process other bytes.
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

// Wraps the shards of a run. Each read requests the next planned bytes, so that the disk stays busy
// while readers copy. Bytes that are cached or not planned are skipped. Thread-safe.
class ReadAhead {
 public:
  // `reads` are the planned reads in file order. `bytes_ahead` is the distance ahead of the
  // readers, at most 1 GiB; 0 disables requests. A source may be null if nothing is read from it.
  ReadAhead(std::vector<ShardRange> reads, std::span<const std::shared_ptr<ByteSource>> shards,
            std::uint64_t bytes_ahead);
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // Returns the sources to use instead of the shards. They live as long as this object.
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_;
  }
  // Returns the requested bytes that were not in the page cache.
  [[nodiscard]] std::uint64_t bytes_asked() const noexcept { return bytes_asked_; }

 private:
  class Source;

  void reach(std::uint32_t shard, ByteRange bytes) noexcept;
  [[nodiscard]] std::uint64_t position(std::uint32_t shard, std::uint64_t offset) const noexcept;
  void ask(std::uint64_t begin, std::uint64_t end) noexcept;

  std::vector<ShardRange> reads_;
  std::vector<std::uint64_t> ends_;  // end of each range, counted in planned bytes
  std::vector<std::shared_ptr<ByteSource>> shards_;
  std::vector<std::shared_ptr<ByteSource>> sources_;
  const std::uint64_t bytes_ahead_;
  std::vector<std::atomic<bool>> asked_;  // by step of the planned bytes
  std::atomic<std::uint64_t> bytes_asked_ = 0;
};

}  // namespace loadstone
