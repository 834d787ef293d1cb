// Computes the values of merges range by range from the operands that a ValueReader reads.
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

// Computes merges in one thread. Uses the memory of merge_sizes() and that of the reader, which is
// opened for one operand after another. Results do not depend on the division into windows. Not
// thread-safe.
class MergeReader {
 public:
  // The arguments must outlive this object. `memory` counts its buffers.
  MergeReader(const ValueSet& values, ValueReader& reader, MergeStatistics& statistics,
              std::atomic<bool>& stop, MemoryCount& memory)
      : values_(values), reader_(reader), statistics_(statistics), stop_(stop), memory_(memory) {}

  // Writes the elements [begin, end) of `value`, which must have a merge, in the value's dtype.
  // Leaves the ValueReader open for a different value. Returns the first element that is non-finite
  // before the cast, or `end`. Throws the errors of the ValueReader, and Error "plan.box" for an
  // invalid merge.
  [[nodiscard]] std::uint64_t read(const Value& value, std::uint64_t begin, std::uint64_t end,
                                   std::span<std::byte> to);

  // Returns the count of finite values since the last call that overflow the value's dtype.
  [[nodiscard]] Overflow take_overflow() noexcept { return std::exchange(overflow_, {}); }

 private:
  // The right matrix of a product, stored in panels.
  struct Kept {
    std::size_t term = 0;
    const float* panels = nullptr;
  };

  // Suffix that names the operand in messages.
  static constexpr const char* magnitudes_field = " (magnitudes)";

  void open(const Value& value);
  void open_operand(std::span<const Box> boxes, const Shape& shape, const char* field);
  void read_numbers(std::uint64_t begin, std::uint64_t end, float* to);
  void read_operand(std::span<const Box> boxes, std::uint64_t buffer, std::uint64_t begin,
                    std::uint64_t end);
  void make_piece(std::uint64_t begin, std::uint64_t end);
  void add_values(std::uint64_t begin, std::uint64_t end);
  void add_differences(std::uint64_t begin, std::uint64_t end);
  void join_differences(std::uint64_t count);
  void combine(std::uint64_t begin, std::uint64_t end);
  void add_terms(std::size_t count, std::uint64_t begin, std::uint64_t end);
  void add_low_rank(std::size_t term, std::uint64_t begin, std::uint64_t end);
  [[nodiscard]] ElementRange rows_of(const LowRank& product, std::uint64_t begin,
                                     std::uint64_t end) const;
  [[nodiscard]] float* row_of(const LowRank& product, std::uint64_t row, std::uint64_t begin) const;
  void normalise_rows(const LowRank& product, std::uint64_t begin, std::uint64_t end);
  void normalise_columns(const LowRank& product, std::uint64_t first_factor, std::uint64_t begin,
                         std::uint64_t end);
  const float* panels_of(std::size_t term);
  // Throws if an operand has a NaN or an infinity, which would spoil a row or a column of the
  // value.
  void require_finite(std::span<const float> numbers, const char* field) const;

  // Measures the whole value.
  void measure();
  [[nodiscard]] std::optional<MergeStatistics::Numbers> measure_arc();
  [[nodiscard]] std::optional<MergeStatistics::Numbers> measure_magnitudes();
  [[nodiscard]] std::optional<MergeStatistics::Measured> measure_all();
  [[nodiscard]] bool measure_columns(std::size_t term);
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
  const Box* operand_ = nullptr;  // the operand that the reader is open for
  std::size_t summands_ = 0;      // number of operands of the merge; added terms follow them
  MergeStatistics::Measured measured_;
  Overflow overflow_;
  std::optional<CountedMemory> numbers_;  // operand buffers, followed by the left matrix
  std::optional<CountedMemory> right_;
  std::vector<Kept> kept_;
  std::uint64_t right_used_ = 0;  // in floats
};

}  // namespace loadstone
