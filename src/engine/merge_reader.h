// Values of merges, computed range by range from what a ValueReader brings.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "boxes/merges.h"
#include "boxes/value.h"
#include "engine/memory_count.h"
#include "engine/merge_statistics.h"
#include "engine/value_reader.h"

namespace loadstone {

// One thread's part of a merge. Takes the memory of merge_sizes(), and the reader's, which it opens
// for one operand after the other. The values of a range do not depend on the division into
// windows. Not thread-safe.
class MergeReader {
 public:
  // The arguments must outlive the reader. `memory`: counts its buffers.
  MergeReader(const ValueSet& values, ValueReader& reader, MergeStatistics& statistics,
              std::atomic<bool>& stop, MemoryCount& memory)
      : values_(values), reader_(reader), statistics_(statistics), stop_(stop), memory_(memory) {}

  // Writes the elements [begin, end) of the value, which has a merge, in its dtype. The reader is
  // then open for a different value. Returns the first element that is non-finite before the cast,
  // or `end`. Throws the reader's errors; Error "plan.box" for an unchecked merge.
  [[nodiscard]] std::uint64_t read(const Value& value, std::uint64_t begin, std::uint64_t end,
                                   std::span<std::byte> to);

  // Returns the finite values since the last call that overflow the value's dtype.
  [[nodiscard]] Overflow take_overflow() noexcept { return std::exchange(overflow_, {}); }

 private:
  // A right matrix in panels.
  struct Kept {
    std::size_t term = 0;
    const float* panels = nullptr;
  };

  void open(const Value& value);
  void open_operand(std::span<const Box> boxes, const Shape& shape, const char* field);
  void read_numbers(std::uint64_t begin, std::uint64_t end, float* to);
  void read_operand(std::span<const Box> boxes, std::uint64_t buffer, std::uint64_t begin,
                    std::uint64_t end);
  void make_piece(std::uint64_t begin, std::uint64_t end);
  void add_values(std::uint64_t begin, std::uint64_t end);
  void add_differences(std::uint64_t begin, std::uint64_t end);
  void join_differences(std::uint64_t count);
  void add_low_rank(std::size_t term, std::uint64_t begin, std::uint64_t end);
  void normalise(const Term& term, std::uint64_t first_row, std::uint64_t rows,
                 std::uint64_t begin);
  const float* panels_of(std::size_t term);
  // An adapter's NaN or infinity spoils a row or a column of the value.
  void require_finite(std::span<const float> numbers, const char* field) const;

  // Sizes for the whole value.
  void measure();
  [[nodiscard]] std::optional<MergeStatistics::Numbers> measure_arc();
  [[nodiscard]] std::optional<MergeStatistics::Numbers> measure_magnitudes();
  template <typename Visit>
  [[nodiscard]] bool for_each_difference(const Visit& visit);
  [[nodiscard]] float* buffer(std::uint64_t number) const;
  [[nodiscard]] bool is_stopped() const { return stop_.load(std::memory_order_relaxed); }

  const ValueSet& values_;
  ValueReader& reader_;
  MergeStatistics& statistics_;
  std::atomic<bool>& stop_;
  MemoryCount& memory_;
  const Value* value_ = nullptr;
  const Merge* merge_ = nullptr;
  MergeSizes sizes_;
  const Box* operand_ = nullptr;  // that the reader is open for
  std::size_t summands_ = 0;      // terms with boxes; products follow them
  MergeStatistics::Numbers measured_;
  Overflow overflow_;
  std::optional<CountedMemory> numbers_;  // buffers, followed by left
  std::optional<CountedMemory> right_;
  std::vector<Kept> kept_;
  std::uint64_t right_used_ = 0;  // in floats
};

}  // namespace loadstone
