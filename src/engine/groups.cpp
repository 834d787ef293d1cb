#include "engine/groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

#include "codec/encode.h"
#include "engine/limits.h"
#include "kernels/encoding_loss.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// Returns the shard of the value's first source, and the offset in that shard. Work in this order
// reads files from start to end.
std::pair<std::uint32_t, std::uint64_t> first_place(const ValueSet& values, const Value& value) {
  std::pair<std::uint32_t, std::uint64_t> first = {UINT32_MAX, UINT64_MAX};
  for (const Box& box : value.boxes) {
    const TensorInfo& source = values.tensors()[box.source];
    first = std::min(first, {source.shard, source.offset_begin});
  }
  return first;
}

[[noreturn]] void refuse_quantization(const Value& value, Problem problem) {
  throw Error("plan.quantize", std::move(problem.message),
              {.tensor = std::string(value.name),
               .found = std::move(problem.found),
               .expected = std::move(problem.expected)});
}

void prepare(const Value& value, GroupMember& member, Group& group) {
  QuantizedLayout& form = member.form.emplace();
  if (auto problem = prepare_quantization(*value.quantization, *value.shape, value.dtype, form)) {
    refuse_quantization(value, std::move(*problem));
  }
  const GroupMember& first = group.members.front();
  if (first.form->stack != form.stack) {
    refuse_quantization(
        value, {"other tensors of the same group are stacks with a different number of matrices",
                value.shape->text(), fmt::format("{} matrices", first.form->stack)});
  }
  group.number_bytes += aligned_part(form.elements * element_bytes(form.dtype));
  if (form.needs_amax) group.amax.assign(form.stack, 0.0F);
  if (form.exact_first) member.matrix_errors.assign(compared_matrices(form), 0.0F);
}

// Allocates the member's memory that is in use from its first window to its last.
void hold(GroupMember& member, Group& group, ValueSink& sink) {
  const QuantizedLayout& form = *member.form;
  member.held.resize(form.parts.size());
  for (std::size_t i = 0; i < form.parts.size(); ++i) {
    if (!is_finished_whole(form, i) || sink.place(member.value, i) != nullptr) continue;
    member.held[i].resize(form.parts[i].byte_count());
    group.held_bytes += member.held[i].size();
  }
  if (form.scratch_bytes == 0) return;
  member.scratch = AnonymousMemory(form.scratch_bytes);
  group.held_bytes += form.scratch_bytes;
}

// Determines which members move their codes. If the group has scales of matrices, all members must
// have the same; then no values need to be measured.
void choose_moved(const ValueSet& values, std::span<const std::shared_ptr<ByteSource>> shards,
                  Group& group) {
  bool are_moved = true;
  for (GroupMember& member : group.members) {
    if (member.form) member.codes = movable_codes(values, values[member.value], *member.form);
    are_moved = are_moved && member.codes != nullptr;
  }
  if (are_moved && !group.amax.empty()) {
    CodeMover mover(values, shards);
    std::optional<std::vector<float>> common;
    for (const GroupMember& member : group.members) {
      const auto scales = mover.matrix_scales(*member.codes, *member.form);
      are_moved = are_moved && !scales.empty() && common.value_or(scales) == scales;
      common = scales;
    }
    if (are_moved) group.exact_scales = *std::move(common);
  }
  group.is_measured = are_moved;
  if (are_moved) return;
  for (GroupMember& member : group.members) member.codes = nullptr;
}

}  // namespace

void choose_exact_scales(Group& group) {
  for (std::size_t i = 0; i < group.exact.size(); ++i) {
    const QuantizedLayout& form = *group.members.front().form;
    group.exact_scales.push_back(exact_matrix_scale(form, group.amax[i], group.exact[i]));
  }
}

GroupSize size_of(const ValueSet& values, std::span<const std::uint32_t> numbers) {
  GroupSize size;
  for (const std::uint32_t i : numbers) {
    const Value& value = values[i];
    QuantizedLayout form;
    const std::uint64_t bytes = value.bytes_of(value.elements());
    if (value.quantization &&
        !prepare_quantization(*value.quantization, *value.shape, value.dtype, form)) {
      size.is_quantized = true;
      size.is_measured = size.is_measured || form.needs_amax;
    }
    size.number_bytes += size.is_quantized ? aligned_part(bytes) : bytes;
  }
  return size;
}

void append_groups(const ValueSet& values, std::span<const std::uint32_t> numbers,
                   GroupList& groups) {
  // The first source position of a group, and the index of the group.
  struct Item {
    std::pair<std::uint32_t, std::uint64_t> place;
    std::size_t group = 0;
    std::uint32_t value = 0;
  };
  std::vector<Item> items;
  items.reserve(numbers.size());
  for (const std::uint32_t i : numbers) items.push_back({first_place(values, values[i]), 0, i});
  std::ranges::stable_sort(items, {}, &Item::place);
  std::map<std::string_view, std::size_t> shared;
  for (std::size_t i = 0; i < items.size(); ++i) {
    items[i].group = i;
    const Value& value = values[items[i].value];
    QuantizedLayout form;
    if (!value.quantization || value.quantization->group.empty() ||
        prepare_quantization(*value.quantization, *value.shape, value.dtype, form) ||
        !shares_scale(*value.quantization, form)) {
      continue;
    }
    items[i].group = shared.try_emplace(value.quantization->group, i).first->second;
  }
  std::ranges::stable_sort(items, {}, &Item::group);
  for (std::size_t i = 0; i < items.size(); ++i) {
    groups.numbers.push_back(items[i].value);
    const bool is_last = i + 1 == items.size() || items[i + 1].group != items[i].group;
    if (is_last) groups.ends.push_back(groups.numbers.size());
  }
}

std::shared_ptr<Group> make_group(const ValueSet& values, std::span<const std::uint32_t> numbers,
                                  std::span<const std::shared_ptr<ByteSource>> shards,
                                  ValueSink& sink, MemoryCount& memory) {
  auto group = std::make_shared<Group>();
  group->members.reserve(numbers.size());
  for (const std::uint32_t i : numbers) {
    const Value& value = values[i];
    GroupMember& member = group->members.emplace_back();
    member.value = i;
    member.elements = member.left = value.elements();
    if (!value.quantization) continue;
    prepare(value, member, *group);
    hold(member, *group, sink);
  }
  const bool is_exact = std::ranges::all_of(group->members, [](const GroupMember& member) {
    return member.form && member.form->exact_first;
  });
  if (is_exact) {
    group->exact.resize(group->amax.size());
    choose_moved(values, shards, *group);
  }
  group->held_bytes += group->amax.size() * sizeof(float) +
                       group->exact.size() * (sizeof(ExactScales) + sizeof(float));
  group->memory = &memory;
  memory.take(group->held_bytes);
  return group;
}

}  // namespace loadstone
