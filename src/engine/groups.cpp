#include "engine/groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

#include "codec/encode.h"
#include "engine/limits.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// The shard of the value's first source, and where in it that begins: work in this order reads
// files from front to back.
std::pair<std::uint32_t, std::uint64_t> first_place(const ValueSet& values, const Value& value) {
  std::pair<std::uint32_t, std::uint64_t> first = {UINT32_MAX, UINT64_MAX};
  for (const Box& box : value.boxes) {
    const TensorInfo& source = values.tensors()[box.source];
    first = std::min(first, {source.shard, source.offset_begin});
  }
  return first;
}

[[noreturn]] void refuse_quantization(const Value& target, Problem problem) {
  throw Error("plan.quantize", std::move(problem.message),
              {.tensor = std::string(target.name),
               .found = std::move(problem.found),
               .expected = std::move(problem.expected)});
}

void prepare(const Value& target, GroupMember& member, Group& group) {
  QuantizedLayout& form = member.form.emplace();
  if (auto problem =
          prepare_quantization(*target.quantization, *target.shape, target.dtype, form)) {
    refuse_quantization(target, std::move(*problem));
  }
  const GroupMember& first = group.members.front();
  if (first.form->stack != form.stack) {
    refuse_quantization(target,
                        {"others of its group are stacks of another height", target.shape->text(),
                         fmt::format("{} matrices", first.form->stack)});
  }
  group.number_bytes += aligned_part(form.elements * element_bytes(form.dtype));
  if (form.needs_amax) group.amax.assign(form.stack, 0.0F);
}

// Keeps memory from the first window to the last.
void hold(GroupMember& member, Group& group, ValueSink& sink) {
  const QuantizedLayout& form = *member.form;
  member.held.resize(form.parts.size());
  for (std::size_t i = 0; i < form.parts.size(); ++i) {
    if (!is_finished_whole(form, i) || sink.place(member.target, i) != nullptr) continue;
    member.held[i].resize(form.parts[i].byte_count());
    group.held_bytes += member.held[i].size();
  }
  if (form.scratch_bytes == 0) return;
  member.scratch = AnonymousMemory(form.scratch_bytes);
  group.held_bytes += form.scratch_bytes;
}

}  // namespace

GroupSize size_of(const ValueSet& values, std::span<const std::uint32_t> targets) {
  GroupSize size;
  for (const std::uint32_t i : targets) {
    const Value& target = values[i];
    QuantizedLayout form;
    const std::uint64_t bytes = target.bytes_of(target.elements());
    if (target.quantization &&
        !prepare_quantization(*target.quantization, *target.shape, target.dtype, form)) {
      size.is_quantized = true;
      size.is_measured = size.is_measured || form.needs_amax;
    }
    size.number_bytes += size.is_quantized ? aligned_part(bytes) : bytes;
  }
  return size;
}

void append_groups(const ValueSet& values, std::span<const std::uint32_t> targets,
                   GroupList& groups) {
  // Each with the first place of its group, and that group's number.
  struct Item {
    std::pair<std::uint32_t, std::uint64_t> place;
    std::size_t group = 0;
    std::uint32_t target = 0;
  };
  std::vector<Item> items;
  items.reserve(targets.size());
  for (const std::uint32_t i : targets) items.push_back({first_place(values, values[i]), 0, i});
  std::ranges::stable_sort(items, {}, &Item::place);
  std::map<std::string_view, std::size_t> shared;
  for (std::size_t i = 0; i < items.size(); ++i) {
    items[i].group = i;
    const Value& target = values[items[i].target];
    QuantizedLayout form;
    if (!target.quantization || target.quantization->group.empty() ||
        prepare_quantization(*target.quantization, *target.shape, target.dtype, form) ||
        !shares_scale(*target.quantization, form)) {
      continue;
    }
    items[i].group = shared.try_emplace(target.quantization->group, i).first->second;
  }
  std::ranges::stable_sort(items, {}, &Item::group);
  for (std::size_t i = 0; i < items.size(); ++i) {
    groups.targets.push_back(items[i].target);
    const bool is_last = i + 1 == items.size() || items[i + 1].group != items[i].group;
    if (is_last) groups.ends.push_back(groups.targets.size());
  }
}

std::shared_ptr<Group> make_group(const ValueSet& values, std::span<const std::uint32_t> targets,
                                  ValueSink& sink, MemoryCount& memory) {
  auto group = std::make_shared<Group>();
  group->members.reserve(targets.size());
  for (const std::uint32_t i : targets) {
    const Value& target = values[i];
    GroupMember& member = group->members.emplace_back();
    member.target = i;
    member.elements = member.left = target.elements();
    if (!target.quantization) continue;
    prepare(target, member, *group);
    hold(member, *group, sink);
  }
  group->held_bytes += group->amax.size() * sizeof(float);
  group->memory = &memory;
  memory.take(group->held_bytes);
  return group;
}

}  // namespace loadstone
