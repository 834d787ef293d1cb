// What a run may hold at most: the plan promises it, and the engine sizes itself by nothing else.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "base/ceil_div.h"
#include "boxes/check_boxes.h"
#include "boxes/dims.h"
#include "boxes/value.h"
#include "codec/decode.h"
#include "engine/box_read.h"
#include "kernels/quantize.h"
#include "loadstone/budget.h"
#include "loadstone/defaults.h"

namespace loadstone {

inline constexpr std::uint64_t page_bytes = 4096;
// No reader of a value takes less: a block and its numbers have to fit.
inline constexpr std::uint64_t reader_bytes_least = 4096;

// The most that a decoding's components take beside its numbers, in a slot of so many bytes.
[[nodiscard]] std::uint64_t parts_bytes_max(const DecodeForm& form,
                                            std::uint64_t slot_bytes) noexcept;

// How much of a file is looked at in one go.
struct WindowLimits {
  std::uint64_t direct_bytes = 0;      // pieces that are read into their place
  std::uint64_t staged_bytes = 0;      // pieces that are cast or scattered: what fits near caches
  std::uint64_t transposed_bytes = 0;  // transposed: more rows make longer runs in the target
  std::uint64_t decoded_bytes = 0;  // of what is decoded, at most: what it is made of is there too
};

// For a reader whose slot of staging has so many bytes, and that reads as much in one go.
[[nodiscard]] WindowLimits window_limits(std::uint64_t slot_bytes,
                                         std::uint64_t chunk_bytes) noexcept;

// Whether the target's elements stand in another order than those of a source, so that each window
// has to look through more of the source than it takes.
[[nodiscard]] bool is_transposed(const Value& value) noexcept;
// Whether the numbers of a group, each value at an address for kernels, are read once, measured and
// encoded in one window.
[[nodiscard]] constexpr bool is_made_whole(std::uint64_t number_bytes,
                                           std::uint64_t window_bytes) noexcept {
  return number_bytes <= window_bytes;
}
// Of a target, where windows may have so many.
[[nodiscard]] std::uint64_t window_bytes_of(const Value& value,
                                            std::uint64_t window_bytes) noexcept;

// With what follows at an address that any kernel can write to.
[[nodiscard]] constexpr std::uint64_t aligned_part(std::uint64_t bytes) noexcept {
  return round_up(bytes, 64);
}
// As many as so many bytes hold: at least one step, unless the value has less.
[[nodiscard]] std::uint64_t elements_in(const QuantizeForm& form, std::uint64_t bytes) noexcept;

// Of small values that are copied to a device in one call: so much takes longer than the call.
inline constexpr std::uint64_t batch_bytes = 256 << 10;

// Where values go, and so how: into memory of the host whole values are read in the
// order of the file, and only what is quantized is made window by window; into files and devices
// all are.
enum class SinkKind : std::uint8_t { memory, files };

// The limits of a budget. Threads are fewer where each would have less than is worth a thread.
struct BudgetLimits {
  unsigned threads = 1;
  std::uint64_t bytes_max = 0;  // all threads, less what values hold
  std::uint64_t held_bytes_max = UINT64_MAX;
  std::uint64_t thread_bytes_wanted = 64 << 10;
  std::uint64_t thread_bytes_max = 2 * defaults::chunk_bytes;
  std::uint64_t chunk_bytes = defaults::chunk_bytes;  // of one read
};

class Needs;

// What was promised for a load.
struct Promise {
  unsigned threads = 1;
  std::uint64_t bytes_max = 0;  // asked for, all threads together
};
// The bytes that a load by these threads holds at most, besides those of the values themselves.
[[nodiscard]] std::uint64_t bytes_promised(const Needs& needs, const Promise& promise);
// The budget of a load by any number of threads and any chunk, which holds no more than promised.
[[nodiscard]] Budget load_budget(const Needs& needs, const Promise& promise, unsigned threads,
                                 std::uint64_t chunk_bytes = defaults::chunk_bytes);

// The needs of values, whatever the budget. Refers to the values.

class Needs {
 public:
  // `pinned_bytes_max`: of the ring, all threads together.
  Needs(const ValueSet& values, SinkKind sink, std::uint64_t pinned_bytes_max = UINT64_MAX);

  // Of the sources, each byte once.
  [[nodiscard]] std::uint64_t bytes_to_read() const noexcept { return bytes_to_read_; }
  // One thread cannot do with less.
  [[nodiscard]] std::uint64_t thread_bytes_least() const;
  // Of the largest values that so many threads have in hand: one more waits for its last window.
  [[nodiscard]] std::uint64_t held_bytes(unsigned threads) const;
  // Of each thread: for the boxes of the value that has most, once they are cut and walked.
  [[nodiscard]] std::uint64_t box_bytes() const noexcept;
  // That so many threads take with this budget: less than it, where there is less to move.
  [[nodiscard]] std::uint64_t bytes_under_way(const Budget& budget) const;

  [[nodiscard]] Budget budget(const BudgetLimits& limits) const;

 private:
  // How bytes reach memory.
  struct Ways {
    bool has_direct = false;    // read into their place
    bool has_overlaps = false;  // but for those that have more places than one
    bool has_staged = false;    // cast or scattered
    bool has_transposed = false;
    bool has_decoded = false;
    std::uint64_t bytes_least = 0;
    std::uint64_t parts_bytes = 0;  // that components of what is decoded may take
    std::uint64_t bytes = 0;        // that go through slots, of all values
    std::uint64_t value_bytes = 0;  // of the value that has most; no bound where it has holes

    [[nodiscard]] Slot slot(std::uint64_t bytes, std::uint64_t chunk_bytes) const;
  };
  // ValueSet that are made together, by windows.
  struct Group {
    std::uint64_t number_bytes = 0;
    std::uint64_t held_bytes = 0;
    std::uint64_t step_bytes = 0;  // of the largest step of windows
    std::uint64_t members = 0;
    bool is_quantized = false;
    bool is_measured = false;
    bool is_transposed = false;
    bool is_sent = false;  // made in a slot of the ring
  };
  // Bytes of a shard.
  struct Stretch {
    std::uint32_t shard = 0;
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t bytes = 0;  // fewer than from begin to end where holes are passed over
    Ways* ways = nullptr;     // none: a component of what is decoded
    bool is_direct = false;
    std::uint64_t hole = 0;  // before it, that is read over
  };

  void add_boxes(const Value& value, Ways& ways);
  // Of a target with a merge: each of its operands is read as a value of F32.
  void add_merge(const Value& value);
  // How much of it is staged.
  [[nodiscard]] std::uint64_t add_box(const Value& value, const Box& box, Ways& ways);
  void add_window_value(const Value& value, const QuantizeForm* form,
                        std::map<std::string_view, std::size_t>& shared);
  void count_reads();
  void stage(const Stretch& first, const Stretch& second);
  [[nodiscard]] std::uint64_t encoded_bytes(std::uint64_t piece_bytes) const;
  [[nodiscard]] std::uint64_t windows_in_hand() const noexcept;
  [[nodiscard]] std::uint64_t window_use(std::uint64_t window_bytes,
                                         std::uint64_t slot_bytes) const;
  [[nodiscard]] std::uint64_t window_count(std::uint64_t window_bytes,
                                           std::uint64_t slot_bytes) const;
  [[nodiscard]] std::uint64_t slot_bytes_max(unsigned threads) const noexcept;
  [[nodiscard]] Ring ring(unsigned threads, std::uint64_t window_bytes, std::uint64_t use) const;
  [[nodiscard]] Budget share(unsigned threads, std::uint64_t each, std::uint64_t chunk_bytes) const;

  const ValueSet& values_;
  std::uint64_t pinned_bytes_max_;
  SinkKind sink_;
  bool has_device_ = false;          // some value goes to one
  bool has_numbers_ = false;         // windows are made in memory of their thread
  bool encodes_apart_ = false;       // what is quantized has no place yet
  Ways whole_;                       // of whole values
  Ways windows_;                     // of values that are made by windows
  std::vector<Stretch> stretches_;   // until they are counted
  std::vector<Group> groups_;        // the largest held_bytes first
  std::vector<QuantizeForm> forms_;  // one of each kind
  std::uint64_t number_bytes_ = 0;   // of all that is made by windows
  std::uint64_t device_bytes_ = 0;   // of that, what goes to devices
  std::uint64_t boxes_most_ = 0;     // of one of them
  std::uint64_t step_bytes_ = 0;     // of numbers, that no form can do with less than
  // That merges are computed in: each region is that of the target that needs most of it.
  std::uint64_t merge_numbers_ = 0;
  std::uint64_t merge_rights_ = 0;
  std::uint64_t merge_counts_ = 0;
  std::uint64_t merge_bytes_ = 0;  // all of them
  std::uint64_t bytes_to_read_ = 0;
};

}  // namespace loadstone
