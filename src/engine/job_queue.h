// All that has to be read, as jobs in the order of the files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "boxes/value.h"
#include "engine/walk.h"

namespace loadstone {

// Makes jobs on demand, so that its memory is the list of boxes (24 bytes each) and the boxes that
// overlap in the file at one place. Thread-safe.
class JobQueue {
 public:
  // `places`: where each value is written; null: not in this run. Checks every box.
  JobQueue(const ValueSet& values, std::span<std::byte* const> places, const WindowLimits& limits);

  // Bytes of the sources that the jobs bring to their places.
  [[nodiscard]] std::uint64_t bytes_total() const noexcept { return bytes_total_; }
  // Gets the next job in file order; returns false if none is left.
  [[nodiscard]] bool next(Job& job);

 private:
  struct Item {
    std::uint64_t file_begin = 0;
    std::uint32_t shard = 0;
    std::uint32_t decoding = no_decoding;
    std::uint32_t value = 0;
    std::uint32_t box = 0;
  };

  // Opens what begins before the window's end in the shard or decoding of the open boxes.
  void open_items(std::uint64_t window_end);
  void push(Walk walk);
  Walk pop();

  const ValueSet& values_;
  WindowLimits limits_;
  std::uint64_t bytes_total_ = 0;
  std::vector<Item> items_;  // in file order
  std::mutex mutex_;
  std::size_t next_item_ = 0;  // guarded by mutex_, as all that follows
  std::uint32_t shard_ = 0;    // of the open boxes
  std::uint32_t decoding_ = no_decoding;
  std::vector<Walk> open_;     // a heap: the one that goes on first in the file is at the front
  std::vector<Walk> waiting_;  // what does not fit the window that is being filled
};

}  // namespace loadstone
