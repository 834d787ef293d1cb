// Groups of values that are made together because they share a scale. Any other value is a group of
// one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "boxes/value.h"
#include "engine/code_mover.h"
#include "engine/memory_count.h"
#include "engine/pages.h"
#include "engine/value_sink.h"
#include "kernels/quantize.h"

namespace loadstone {

// One value of a group.
struct GroupMember {
  std::uint32_t value = 0;
  std::uint64_t elements = 0;
  std::optional<QuantizedLayout> form;  // not set: the value is not quantized
  // A buffer for each component that every window writes to and that has no memory in the sink.
  // Empty for other components.
  std::vector<std::vector<std::byte>> held;
  AnonymousMemory scratch;
  std::shared_ptr<const MovableCodes> codes;  // null: values are decoded and encoded again
  // Guarded by the mutex of WindowWork.
  EncodingLoss loss;
  std::vector<float> matrix_errors;  // see compare_window()
  std::uint64_t next = 0;            // the first element that no window contains yet
  std::uint64_t left = 0;            // number of elements that are not done yet
};

// The members that change are guarded by the mutex of the WindowQueue. The bytes of a window belong
// to the thread that has the window.
struct Group {
  std::vector<GroupMember> members;
  std::vector<float> amax;  // one per matrix of the stack; empty if unused
  // One per matrix. Empty unless the values of all members are decoded codes.
  std::vector<ExactScales> exact;
  // Results of exact_matrix_scale(), after measuring; or the scales of codes that are moved.
  std::vector<float> exact_scales;
  std::size_t member = 0;     // index of the member from which the next window is taken
  std::size_t measuring = 0;  // number of windows that threads are measuring
  bool is_measured = false;
  std::uint64_t number_bytes = 0;  // decoded bytes of all members, each aligned for kernels
  std::uint64_t held_bytes = 0;
  MemoryCount* memory = nullptr;

  Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    if (memory != nullptr) memory->give_back(held_bytes);
  }
};

// Targets in processing order, and the end index of each group. Targets with the same
// Quantization::group are one group, at the position of its first target.
struct GroupList {
  std::vector<std::uint32_t> numbers;
  std::vector<std::size_t> ends;

  [[nodiscard]] std::span<const std::uint32_t> operator[](std::size_t group) const noexcept {
    const std::size_t begin = group == 0 ? 0 : ends[group - 1];
    return std::span(numbers).subspan(begin, ends[group] - begin);
  }
  [[nodiscard]] std::size_t size() const noexcept { return ends.size(); }
};

// Computes the group's exact scales, after all its members are measured.
void choose_exact_scales(Group& group);

struct GroupSize {
  std::uint64_t number_bytes = 0;  // decoded bytes of all members, each aligned for kernels
  bool is_quantized = false;
  bool is_measured = false;  // the group is measured before it is encoded
};
[[nodiscard]] GroupSize size_of(const ValueSet& values, std::span<const std::uint32_t> numbers);

// Appends the groups of these values, ordered by the positions of their source bytes in the files.
void append_groups(const ValueSet& values, std::span<const std::uint32_t> numbers,
                   GroupList& groups);

// Prepares a group. If its codes can be moved, reads the scales of its matrices. Throws Error
// "plan.quantize" if the plan was not checked, "memory.host", and errors of reading.
[[nodiscard]] std::shared_ptr<Group> make_group(const ValueSet& values,
                                                std::span<const std::uint32_t> numbers,
                                                std::span<const std::shared_ptr<ByteSource>> shards,
                                                ValueSink& sink, MemoryCount& memory);

}  // namespace loadstone
