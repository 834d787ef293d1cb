// Computes the memory that a run may use. The plan promises this figure, and the engine sizes its
// buffers by it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "base/ceil_div.h"
#include "boxes/value.h"
#include "codec/decode.h"
#include "engine/read_count.h"
#include "kernels/quantize.h"
#include "loadstone/budget.h"
#include "loadstone/defaults.h"

namespace loadstone {

inline constexpr std::uint64_t page_bytes = 4096;
// Minimum staging memory of a reader: one block and its decoded values must fit.
inline constexpr std::uint64_t reader_bytes_least = 4096;

// Returns the maximum bytes that components use in a slot, in addition to the decoded values.
[[nodiscard]] std::uint64_t parts_bytes_max(const PreparedDecoder& form,
                                            std::uint64_t slot_bytes) noexcept;

// Window sizes of a job, by the way in which its pieces reach their destinations.
struct WindowLimits {
  std::uint64_t direct_bytes = 0;  // pieces that are read directly into their destination
  std::uint64_t staged_bytes = 0;  // pieces that are cast or scattered, sized for caches
  // Transposed pieces: more rows give longer runs in the target.
  std::uint64_t transposed_bytes = 0;
  std::uint64_t decoded_bytes = 0;  // decoded pieces: components need the rest of the slot
};

// Returns the window sizes of a reader with the given slot and chunk sizes.
[[nodiscard]] WindowLimits window_limits(std::uint64_t slot_bytes,
                                         std::uint64_t chunk_bytes) noexcept;

// Returns the window size of a value, at most `window_bytes`.
[[nodiscard]] std::uint64_t window_bytes_of(const Value& value,
                                            std::uint64_t window_bytes) noexcept;

// Rounds up to 64 bytes, so that the next part is aligned for all kernels.
[[nodiscard]] constexpr std::uint64_t aligned_part(std::uint64_t bytes) noexcept {
  return round_up(bytes, 64);
}
// Returns how many elements fit into `bytes`, in whole steps of the layout: at least one step, and
// at most all elements.
[[nodiscard]] std::uint64_t elements_in(const QuantizedLayout& form, std::uint64_t bytes) noexcept;

// Maximum bytes of small values per copy call to a device. Above this size, the copy takes longer
// than the overhead of the call.
inline constexpr std::uint64_t batch_bytes = 256 << 10;

// Memory and threads of a run. The run uses fewer threads if each would get too little memory.
struct LimitOptions {
  unsigned threads = 1;
  std::uint64_t bytes_max = 0;  // of all threads, without held bytes
  std::uint64_t held_bytes_max = UINT64_MAX;
  std::uint64_t thread_bytes_wanted = 64 << 10;
  std::uint64_t thread_bytes_max = 2 * defaults::chunk_bytes;
  std::uint64_t chunk_bytes = defaults::chunk_bytes;  // of one read
};

// Memory limits that follow from a set of values: the total bytes to move, and the largest value of
// each kind. Immutable after construction. The values must outlive it.
class Limits {
 public:
  // `pinned_bytes_max` limits the ring of all threads together.
  explicit Limits(const ValueSet& values, std::uint64_t pinned_bytes_max = UINT64_MAX);

  // Returns the bytes of the sources, each counted once.
  [[nodiscard]] std::uint64_t bytes_to_read() const noexcept { return bytes_to_read_; }
  // Returns the bytes that a run with this budget reads: it reads values again that it measures
  // first. Excludes repeated reads of transposed values.
  [[nodiscard]] std::uint64_t bytes_to_read(const Budget& budget) const noexcept;
  // Returns the minimum memory of one thread.
  [[nodiscard]] std::uint64_t thread_bytes_least() const;
  // Returns the bytes held for the largest values that `threads` process at once, plus one more
  // value that waits for its last window.
  [[nodiscard]] std::uint64_t held_bytes(unsigned threads) const;
  // Returns the bytes that each thread needs for the boxes of the value with the most boxes.
  [[nodiscard]] std::uint64_t box_bytes() const noexcept;

  [[nodiscard]] Budget budget(const LimitOptions& options) const;
  // Returns the maximum memory of a run with this budget. The result is below the budget if there
  // is less to move.
  [[nodiscard]] std::uint64_t bytes_held(const Budget& budget) const;

  // Returns the maximum memory that a load uses in addition to the values. `promise` has the
  // options that the plan was made with.
  [[nodiscard]] std::uint64_t bytes_promised(const LimitOptions& promise) const;
  // Returns the budget of a load with any number of threads and any chunk size. The budget does not
  // exceed the promised memory.
  [[nodiscard]] Budget load_budget(const LimitOptions& promise, unsigned threads,
                                   std::uint64_t chunk_bytes = defaults::chunk_bytes) const;

 private:
  // Totals for bytes that pass through slots.
  struct Staged {
    std::uint64_t bytes = 0;        // of all values
    std::uint64_t value_bytes = 0;  // of the largest value; UINT64_MAX if it has holes
    std::uint64_t bytes_least = 0;  // minimum slot: an element with its components
    std::uint64_t parts_bytes = 0;  // maximum bytes of components
    bool is_mixed = false;          // some bytes are read directly into their destination
    bool is_cast = false;           // some pieces are cast or scattered
    bool is_transposed = false;
    bool is_repeated = false;  // a source is read again for other windows

    // Returns a slot of at most `most` bytes, with the part of it that these values use.
    [[nodiscard]] Slot slot(std::uint64_t most, std::uint64_t chunk_bytes) const noexcept;
  };
  // Values that are made together, window by window.
  struct Group {
    std::uint64_t value_bytes = 0;
    std::uint64_t held_bytes = 0;
    std::uint64_t step_bytes = 0;        // of the largest step of a layout
    bool has_large_windows = false;      // windows are as large as memory allows
    bool is_measured = false;            // measured before it is encoded
    std::uint64_t pass_bytes = 0;        // of the sources, for one pass over all values
    std::uint64_t statistics_bytes = 0;  // of the sources, for the statistics of merges
  };
  // A byte range of a shard, with the totals that it belongs to.
  struct Stretch {
    CountedBytes at;
    Staged* staged = nullptr;  // null: the range belongs to a component
    bool is_direct = false;
  };

  void add_value(const Value& value, Staged& staged);
  void add_merge(const Value& value);
  [[nodiscard]] std::uint64_t add_box(const Value& value, const Box& box, Staged& staged);
  void add_windows(const Value& value, const QuantizedLayout* form, std::uint64_t pass_bytes,
                   std::map<std::string_view, std::size_t>& shared);
  // Returns the bytes of the ranges in stretches_ from index `first` on, each counted once.
  [[nodiscard]] std::uint64_t bytes_since(std::size_t first) const;
  void count_reads();
  [[nodiscard]] std::uint64_t encoded_bytes(std::uint64_t piece_bytes) const;
  [[nodiscard]] std::uint64_t windows_in_hand() const noexcept;
  [[nodiscard]] std::uint64_t window_use(std::uint64_t window_bytes) const;
  [[nodiscard]] std::uint64_t window_count(std::uint64_t window_bytes) const noexcept;
  [[nodiscard]] std::uint64_t slot_bytes_max(unsigned threads) const noexcept;
  [[nodiscard]] Ring ring(unsigned threads, std::uint64_t window_bytes, std::uint64_t use) const;
  [[nodiscard]] Budget share(unsigned threads, std::uint64_t each, std::uint64_t chunk_bytes) const;

  static constexpr std::uint64_t window_bytes_least = 32 << 10;

  const ValueSet& values_;
  const std::uint64_t pinned_bytes_max_;
  bool has_device_ = false;             // at least one value is on a device
  bool has_host_windows_ = false;       // windows are made in the memory of their thread
  bool needs_encoded_ = false;          // codes need memory besides their destination
  Staged whole_;                        // whole values
  Staged windows_;                      // of values that are made by windows
  std::vector<Stretch> stretches_;      // cleared once they have been counted
  std::vector<Group> groups_;           // sorted by held_bytes, largest first
  std::vector<QuantizedLayout> forms_;  // one for each different layout
  std::uint64_t window_values_ = 0;     // number of values that are made by windows
  std::uint64_t window_bytes_ = 0;      // of all values that are made by windows
  std::uint64_t device_bytes_ = 0;      // the part of window_bytes_ on devices
  std::uint64_t boxes_most_ = 0;        // of the value with the most boxes
  // The smallest window that is valid for every layout.
  std::uint64_t window_least_ = window_bytes_least;
  // Maxima over all values of the three buffers of a merge: decoded values, right matrices, counts.
  std::array<std::uint64_t, 3> merge_parts_ = {};
  std::uint64_t merge_bytes_ = 0;  // all three
  std::uint64_t bytes_to_read_ = 0;
};

}  // namespace loadstone
