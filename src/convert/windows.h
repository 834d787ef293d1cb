// A conversion cut into parts that one thread does in one go.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "convert/groups.h"
#include "loadstone/convert.h"

namespace loadstone {

// What is done with the elements [begin, end) of a value.
struct Window {
  enum class Step : std::uint8_t {
    copy,     // written as they are, to file_offset
    whole,    // all of a group: read once, measured, quantized
    measure,  // the largest magnitude is wanted
    encode,   // quantized, now that all is known
  };

  Step step = Step::copy;
  std::uint32_t file = 0;    // index into Conversion::files
  std::uint32_t target = 0;  // index into Plan::targets
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t file_offset = 0;
  std::uint64_t byte_count = 0;  // that it writes; of what is quantized its thread says how many
  const OutputTensor* tensor = nullptr;  // of a copy; null: a file without data
  std::shared_ptr<Group> group;
  std::size_t member = 0;  // of the group
};

// Hands out windows, file by file, and within a file in the order of the sources. A group that is
// too large for one thread's memory is measured by all threads and then encoded by all; what comes
// behind it is begun meanwhile. Thread-safe.
class WindowQueue {
 public:
  // Only the files that `wanted` names by their index; empty: all of them.
  explicit WindowQueue(const Conversion& conversion, std::vector<bool> wanted = {});

  // The next one; false when there is none left, or the work is stopped. A file without data has
  // one window of no bytes.
  [[nodiscard]] bool next(Window& window, const std::atomic<bool>& stop);
  // The largest magnitudes in a window that was to be measured.
  void measured(const Window& window, std::span<const float> amax);
  // A window is encoded. True for the last one of its value: what takes all of them can be done.
  [[nodiscard]] bool encoded(const Window& window);
  // The window's bytes are in their place. True for the last one of its file.
  [[nodiscard]] bool finish(const Window& window);

 private:
  // Tensors of the file that are made together.
  struct Unit {
    std::vector<std::uint32_t> tensors;
    bool is_quantized = false;
  };

  void open_file();
  [[nodiscard]] bool take_copy(Window& window);
  [[nodiscard]] bool take_of_group(Group& group, Window& window);
  [[nodiscard]] bool take(Window& window);

  const Conversion& conversion_;
  const std::vector<bool> wanted_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t file_ = 0;     // guarded by mutex_, as all that follows
  std::vector<Unit> units_;  // of the file, those that have elements
  std::size_t unit_ = 0;
  std::uint64_t element_ = 0;
  std::shared_ptr<Group> open_;  // of the unit
  bool is_first_ = true;
  std::deque<std::shared_ptr<Group>> ready_;  // measured, and to be encoded
  std::size_t measuring_ = 0;                 // groups whose windows are all handed out
  std::vector<std::uint64_t> bytes_left_;     // by file
};

// Whether the target's elements stand in another order than those of a source, so that each window
// has to look through more of the source than it takes.
[[nodiscard]] bool is_turned(const PlannedTarget& target) noexcept;

}  // namespace loadstone
