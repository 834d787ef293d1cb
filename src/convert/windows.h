// A conversion cut into parts that one thread does in one go.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "loadstone/convert.h"

namespace loadstone {

// Elements [begin, end) of an output tensor, and where their bytes stand in its file.
struct Window {
  std::uint32_t file = 0;    // index into Conversion::files
  std::uint32_t target = 0;  // index into Plan::targets
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t file_offset = 0;
  std::uint64_t byte_count = 0;
};

// Hands out windows, file by file, and within a file in the order of the sources. Thread-safe.
class WindowQueue {
 public:
  // Of the files that are wanted only; empty: of all.
  explicit WindowQueue(const Conversion& conversion, std::vector<bool> wanted = {});

  // The next one; false when there is none left. A file without data has one window of no bytes.
  [[nodiscard]] bool next(Window& window);
  // The window's bytes are in their place. True for the last one of its file.
  [[nodiscard]] bool finish(const Window& window);

 private:
  void open_file();

  const Conversion& conversion_;
  const std::vector<bool> wanted_;
  std::mutex mutex_;
  std::size_t file_ = 0;              // guarded by mutex_, as all that follows
  std::vector<std::uint32_t> order_;  // of the file's tensors that have elements
  std::size_t tensor_ = 0;            // in order_
  std::uint64_t element_ = 0;
  bool is_first_ = true;
  std::vector<std::uint64_t> bytes_left_;  // by file
};

// Whether the target's elements stand in another order than those of a source, so that each window
// has to look through more of the source than it takes.
[[nodiscard]] bool is_turned(const PlannedTarget& target) noexcept;

}  // namespace loadstone
