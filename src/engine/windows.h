// Cuts values into windows, each of which one thread makes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>

#include "engine/groups.h"
#include "engine/run.h"

namespace loadstone {

// A step of work on the elements [begin, end) of a value.
struct Window {
  enum class Step : std::uint8_t {
    copy,     // copy without quantization
    whole,    // read, measure and quantize a whole group at once
    measure,  // find the largest magnitude and exact scales
    encode,   // quantize, after the whole group is measured
  };

  Step step = Step::copy;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::shared_ptr<Group> group;
  std::size_t member = 0;
};

// Hands out windows group by group. If a group is too large for one thread's memory, all threads
// first measure it and then encode it. Meanwhile, the next groups may start. Thread-safe.
class WindowQueue {
 public:
  // `run` must outlive the queue.
  explicit WindowQueue(const Run& run);

  // Returns the bytes of all values. Values that are measured first count twice.
  [[nodiscard]] std::uint64_t bytes_total() const noexcept { return bytes_total_; }

  // Gets the next window. Returns false if all windows are handed out, or the run is stopped.
  [[nodiscard]] bool next(Window& window, const std::atomic<bool>& stop);
  // Records the statistics of a measured window.
  void measured(const Window& window, std::span<const float> amax,
                std::span<const ExactScales> exact);
  // Records that a window is copied or encoded. Returns true for the last window of its value,
  // after which work on the whole value can be done.
  [[nodiscard]] bool is_last(const Window& window);

 private:
  [[nodiscard]] bool take(Window& window);
  [[nodiscard]] bool take_of_group(Group& group, Window& window) const;
  [[nodiscard]] std::uint64_t elements_per_window(const GroupMember& member) const;

  const Run& run_;
  std::uint64_t bytes_total_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t next_group_ = 0;                // guarded by mutex_, like all members below
  std::shared_ptr<Group> open_;               // the group from which windows are taken
  std::deque<std::shared_ptr<Group>> ready_;  // measured groups that are not yet encoded
  std::size_t measuring_ = 0;  // groups that are being measured, with all windows handed out
};

}  // namespace loadstone
