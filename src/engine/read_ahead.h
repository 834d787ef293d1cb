// Bytes of files that are read next are asked for while others are being worked on.
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

// Stands before the shards of one run. Each read asks the system for the planned bytes behind it,
// so that a disk has work while readers copy; what the page cache holds already is left alone, and
// so is what the plan does not read. Thread-safe.
class ReadAhead {
 public:
  // `reads`: what will be read, in the order of the files. `bytes_ahead`: how far ahead the system
  // is asked, at most 1 GiB; 0: it never is. Sources may be null where nothing is read.
  ReadAhead(std::vector<ShardRange> reads, std::span<const std::shared_ptr<ByteSource>> shards,
            std::uint64_t bytes_ahead);
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // To be read from in the place of the shards; they live as long as this.
  [[nodiscard]] std::span<const std::shared_ptr<ByteSource>> sources() const noexcept {
    return sources_;
  }
  // That the page cache lacked, of what was asked for.
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
