// Values cut into windows, each of which one thread makes at once.
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

// A step that is done with the elements [begin, end) of a value.
struct Window {
  enum class Step : std::uint8_t {
    copy,     // copied without a change
    whole,    // all of a group: read once, measured, quantized
    measure,  // the largest magnitude is wanted
    encode,   // quantized, after all is measured
  };

  Step step = Step::copy;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::shared_ptr<Group> group;
  std::size_t member = 0;
};

// Hands out windows, group by group. All threads measure a group that is too large for one thread's
// memory, and then all encode it; the next groups start meanwhile. Thread-safe.
class WindowQueue {
 public:
  // Must live as long.
  explicit WindowQueue(const Run& run);

  // Bytes of all values, twice for those that are measured first.
  [[nodiscard]] std::uint64_t bytes_total() const noexcept { return bytes_total_; }

  // The next one; false when all are handed out, or the work is stopped.
  [[nodiscard]] bool next(Window& window, const std::atomic<bool>& stop);
  // The largest magnitudes in a window that was to be measured.
  void measured(const Window& window, std::span<const float> amax);
  // A window is copied or encoded. True for the last one of its value: what takes all of them can
  // be done.
  [[nodiscard]] bool is_last(const Window& window);

 private:
  [[nodiscard]] bool take(Window& window);
  [[nodiscard]] bool take_of_group(Group& group, Window& window) const;
  [[nodiscard]] std::uint64_t elements_per_window(const GroupMember& member) const;

  const Run& run_;
  std::uint64_t bytes_total_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t next_group_ = 0;                // guarded by mutex_, as all that follows
  std::shared_ptr<Group> open_;               // that windows are taken from
  std::deque<std::shared_ptr<Group>> ready_;  // measured, and to be encoded
  std::size_t measuring_ = 0;                 // groups whose windows are all handed out
};

}  // namespace loadstone
