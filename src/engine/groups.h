// Values that are made together: partners of one scale, or one alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "boxes/value.h"
#include "engine/memory_count.h"
#include "engine/pages.h"
#include "engine/value_sink.h"
#include "kernels/quantize.h"

namespace loadstone {

// One value of a group.
struct GroupMember {
  std::uint32_t value = 0;
  std::uint64_t elements = 0;
  std::optional<QuantizedLayout> form;  // nullopt: not quantized
  // Components that receive all windows and have no place in the sink's memory; others are empty.
  std::vector<std::vector<std::byte>> held;
  AnonymousMemory scratch;
  std::uint64_t next = 0;  // element that no window has yet
  std::uint64_t left = 0;  // elements that are not done
};

// A queue guards what changes; each window's bytes belong to its thread.
struct Group {
  std::vector<GroupMember> members;
  std::vector<float> amax;    // one per matrix of the stack; empty if unused
  std::size_t member = 0;     // of the next window
  std::size_t measuring = 0;  // windows that are being measured
  bool is_measured = false;
  std::uint64_t number_bytes = 0;  // of all members, each at an address for kernels
  std::uint64_t held_bytes = 0;
  MemoryCount* memory = nullptr;

  Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() {
    if (memory != nullptr) memory->give_back(held_bytes);
  }
};

// Targets in processing order, with partners of one scale together, and the end of each group.
// Targets with the same Quantization::group follow the first of them.
struct GroupList {
  std::vector<std::uint32_t> numbers;
  std::vector<std::size_t> ends;

  [[nodiscard]] std::span<const std::uint32_t> operator[](std::size_t group) const noexcept {
    const std::size_t begin = group == 0 ? 0 : ends[group - 1];
    return std::span(numbers).subspan(begin, ends[group] - begin);
  }
  [[nodiscard]] std::size_t size() const noexcept { return ends.size(); }
};

struct GroupSize {
  std::uint64_t number_bytes = 0;  // of all members, each at an address for kernels
  bool is_quantized = false;
  bool is_measured = false;  // before it is encoded
};
[[nodiscard]] GroupSize size_of(const ValueSet& values, std::span<const std::uint32_t> numbers);

// Appends these values, ordered by the place of their source bytes in the files.
void append_groups(const ValueSet& values, std::span<const std::uint32_t> numbers,
                   GroupList& groups);

// Prepares a group. Throws Error "plan.quantize" for unchecked plans, and "memory.host".
[[nodiscard]] std::shared_ptr<Group> make_group(const ValueSet& values,
                                                std::span<const std::uint32_t> numbers,
                                                ValueSink& sink, MemoryCount& memory);

}  // namespace loadstone
