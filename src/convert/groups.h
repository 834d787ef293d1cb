// Quantized tensors that are made together: partners of one scale, or one alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/ceil_div.h"
#include "execute/anonymous_memory.h"
#include "kernels/quantize.h"
#include "loadstone/convert.h"
#include "loadstone/plan.h"

namespace loadstone {

// Of a target that is quantized. Throws Error "plan.quantize" for plans that nobody checked.
[[nodiscard]] QuantizeForm form_of(const PlannedTarget& target);

// With what follows at an address that any kernel can write to.
[[nodiscard]] constexpr std::uint64_t aligned_part(std::uint64_t bytes) noexcept {
  return round_up(bytes, 64);
}

// As many as so many bytes hold: at least one step, unless the value has less.
[[nodiscard]] std::uint64_t elements_in(const QuantizeForm& form, std::uint64_t bytes) noexcept;

// What is kept from the first window of a value to its last one.
[[nodiscard]] std::uint64_t held_bytes_of(const QuantizeForm& form);
// What so many elements become, each part at an address of its own.
[[nodiscard]] std::uint64_t encoded_bytes_of(const QuantizeForm& form, std::uint64_t elements);

// One value of a group, and where its parts go.
struct GroupMember {
  std::uint32_t target = 0;
  QuantizeForm form;
  std::vector<const OutputTensor*> parts;      // by part
  std::vector<const OutputTensor*> constants;  // beside them
  std::vector<std::vector<std::byte>> held;    // by part; empty for those that windows write
  AnonymousMemory scratch;
  std::uint64_t next = 0;  // element that no window has yet
  std::uint64_t left = 0;  // elements that are not done
};

// A queue guards what changes; each window's bytes belong to its thread.
struct Group {
  std::uint32_t file = 0;
  std::vector<GroupMember> members;
  std::vector<float> amax;    // one for each matrix of the stack; empty where none is needed
  std::size_t member = 0;     // that the next window is of
  std::size_t measuring = 0;  // windows that are being measured
  bool is_measured = false;
  std::uint64_t numbers = 0;  // bytes of all members
};

// `tensors` are the file's that the group writes, of one target after the other.
[[nodiscard]] std::shared_ptr<Group> make_group(const Conversion& conversion, std::uint32_t file,
                                                std::span<const std::uint32_t> tensors);

}  // namespace loadstone
