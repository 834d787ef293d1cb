// The memory that a run may hold: the plan promises it, and the engine sizes itself by it alone.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "base/ceil_div.h"
#include "boxes/value.h"
#include "codec/decode.h"
#include "kernels/quantize.h"
#include "loadstone/budget.h"
#include "loadstone/defaults.h"

namespace loadstone {

inline constexpr std::uint64_t page_bytes = 4096;
// The least staging of a reader: a block and its decoded values must fit.
inline constexpr std::uint64_t reader_bytes_least = 4096;

// Returns the most that components take in a slot, besides the decoded values.
[[nodiscard]] std::uint64_t parts_bytes_max(const PreparedDecoder& form,
                                            std::uint64_t slot_bytes) noexcept;

// Window sizes of one job, by how its pieces are brought to their places.
struct WindowLimits {
  std::uint64_t direct_bytes = 0;      // pieces that are read into their place
  std::uint64_t staged_bytes = 0;      // pieces that are cast or scattered: what fits near caches
  std::uint64_t transposed_bytes = 0;  // transposed: more rows give longer runs in the target
  std::uint64_t decoded_bytes = 0;     // decoded: the components need the rest of the slot
};

// Returns the window sizes of a reader with such a slot and chunk.
[[nodiscard]] WindowLimits window_limits(std::uint64_t slot_bytes,
                                         std::uint64_t chunk_bytes) noexcept;

// Returns the window size of a value, given the largest allowed.
[[nodiscard]] std::uint64_t window_bytes_of(const Value& value,
                                            std::uint64_t window_bytes) noexcept;

// Rounds up, so that the next part has an address that any kernel can write to.
[[nodiscard]] constexpr std::uint64_t aligned_part(std::uint64_t bytes) noexcept {
  return round_up(bytes, 64);
}
// Returns how many elements fit: whole steps, and at least one unless the value has fewer elements.
[[nodiscard]] std::uint64_t elements_in(const QuantizedLayout& form, std::uint64_t bytes) noexcept;

// Bytes of small values that are copied to a device in one call: more take longer than the call.
inline constexpr std::uint64_t batch_bytes = 256 << 10;

// The memory and threads that a run is given. It has fewer threads if each would get too little.
struct LimitOptions {
  unsigned threads = 1;
  std::uint64_t bytes_max = 0;  // all threads, without the values' state
  std::uint64_t held_bytes_max = UINT64_MAX;
  std::uint64_t thread_bytes_wanted = 64 << 10;
  std::uint64_t thread_bytes_max = 2 * defaults::chunk_bytes;
  std::uint64_t chunk_bytes = defaults::chunk_bytes;  // of one read
};

// Bytes of a value in a shard; fewer than its range if the read skips holes.
struct CountedBytes {
  std::uint32_t shard = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t bytes = 0;

  friend auto operator<=>(const CountedBytes&, const CountedBytes&) = default;
};

// Limits that follow from values: sums of bytes to move, and the largest of each kind. A run holds
// no more than its options and these allow. Made once; refers to the values.
class Limits {
 public:
  // `pinned_bytes_max`: of the ring, all threads together.
  explicit Limits(const ValueSet& values, std::uint64_t pinned_bytes_max = UINT64_MAX);

  // Bytes of the sources, each once.
  [[nodiscard]] std::uint64_t bytes_to_read() const noexcept { return bytes_to_read_; }
  // The least memory that one thread needs.
  [[nodiscard]] std::uint64_t thread_bytes_least() const;
  // Bytes held by the largest values that `threads` work on: one more waits for its last window.
  [[nodiscard]] std::uint64_t held_bytes(unsigned threads) const;
  // Bytes of each thread for the boxes of the value that has most, once they are cut and walked.
  [[nodiscard]] std::uint64_t box_bytes() const noexcept;

  [[nodiscard]] Budget budget(const LimitOptions& options) const;
  // The maximal memory of a run with this budget: less than the budget if there is less to move.
  [[nodiscard]] std::uint64_t bytes_held(const Budget& budget) const;

  // The maximal memory of a load in addition to the values. `promise`: the options for which a plan
  // promises it.
  [[nodiscard]] std::uint64_t bytes_promised(const LimitOptions& promise) const;
  // The budget of a load by any number of threads and any chunk, which holds no more than promised.
  [[nodiscard]] Budget load_budget(const LimitOptions& promise, unsigned threads,
                                   std::uint64_t chunk_bytes = defaults::chunk_bytes) const;

 private:
  // Bytes that pass through slots.
  struct Staged {
    std::uint64_t bytes = 0;        // of all values
    std::uint64_t value_bytes = 0;  // of the largest value; no bound if it has holes
    std::uint64_t bytes_least = 0;  // of a slot: an element with its components
    std::uint64_t parts_bytes = 0;  // of components, at most
    bool is_mixed = false;          // with bytes that are read into their place
    bool is_cast = false;           // or scattered
    bool is_transposed = false;
    bool is_repeated = false;  // a source is searched again for other windows

    // Returns a slot of `most` bytes, and how many of them these take.
    [[nodiscard]] Slot slot(std::uint64_t most, std::uint64_t chunk_bytes) const noexcept;
  };
  // Values that are made together, by windows.
  struct Group {
    std::uint64_t value_bytes = 0;
    std::uint64_t held_bytes = 0;
    std::uint64_t step_bytes = 0;    // of the largest step of windows
    bool has_large_windows = false;  // as large as there is memory for
  };
  // Bytes of a shard.
  struct Stretch {
    CountedBytes at;
    Staged* staged = nullptr;  // null: a component
    bool is_direct = false;
  };

  void add_value(const Value& value, Staged& staged);
  void add_merge(const Value& value);
  [[nodiscard]] std::uint64_t add_box(const Value& value, const Box& box, Staged& staged);
  void add_windows(const Value& value, const QuantizedLayout* form,
                   std::map<std::string_view, std::size_t>& shared);
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
  bool has_device_ = false;             // some value is on a device
  bool has_host_windows_ = false;       // windows are made in memory of their thread
  bool encodes_apart_ = false;          // quantized values have no place yet
  Staged whole_;                        // whole values
  Staged windows_;                      // of values that are made by windows
  std::vector<Stretch> stretches_;      // until they are counted
  std::vector<Group> groups_;           // the largest held_bytes first
  std::vector<QuantizedLayout> forms_;  // one of each kind
  std::uint64_t window_values_ = 0;     // how many are made by windows
  std::uint64_t window_bytes_ = 0;      // of all of them
  std::uint64_t device_bytes_ = 0;      // the part of these on devices
  std::uint64_t boxes_most_ = 0;        // of one of them
  // The smallest window that suits every form.
  std::uint64_t window_least_ = window_bytes_least;
  // Maximal decoded values, right matrices and counts of merges, over all values.
  std::array<std::uint64_t, 3> merge_parts_ = {};
  std::uint64_t merge_bytes_ = 0;  // all three
  std::uint64_t bytes_to_read_ = 0;
};

}  // namespace loadstone
