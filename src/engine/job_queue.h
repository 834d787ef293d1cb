// Divides the boxes of a run into jobs, in the order of the files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "boxes/value.h"
#include "engine/walk.h"

namespace loadstone {

// Makes jobs on demand. The queue's memory is therefore only the list of boxes (24 bytes each), and
// the boxes that overlap at the current position in the file. Thread-safe.
class JobQueue {
 public:
  // Checks every box. `places` has the destination of each value; null if the value is not in this
  // run.
  JobQueue(const ValueSet& values, std::span<std::byte* const> places, const WindowLimits& limits);

  // Returns the source bytes that the jobs copy to their destinations.
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

  // Opens the boxes that begin before the window's end, in the current shard or decoding.
  void open_items(std::uint64_t window_end);
  void push(Walk walk);
  Walk pop();

  const ValueSet& values_;
  WindowLimits limits_;
  std::uint64_t bytes_total_ = 0;
  std::vector<Item> items_;  // in file order
  std::mutex mutex_;
  std::size_t next_item_ = 0;  // guarded by mutex_, like all members below
  std::uint32_t shard_ = 0;    // shard of the open boxes
  std::uint32_t decoding_ = no_decoding;
  std::vector<Walk> open_;     // a heap: the box with the lowest file position is at the front
  std::vector<Walk> waiting_;  // boxes that do not fit the current window
};

}  // namespace loadstone
