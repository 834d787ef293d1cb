#include "engine/windows.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "kernels/cast.h"

namespace loadstone {

namespace {

// Interval at which a waiting thread checks for cancellation.
constexpr std::chrono::milliseconds patience{10};

}  // namespace

WindowQueue::WindowQueue(const Run& run) : run_(run) {
  for (std::size_t i = 0; i < run.groups.size(); ++i) {
    const GroupSize size = size_of(run.values, run.groups[i]);
    const bool is_read_twice = size.is_measured && size.number_bytes > run.budget.window_bytes;
    for (const std::uint32_t number : run.groups[i]) {
      const Value& value = run.values[number];
      bytes_total_ += value.bytes_of(value.elements()) * (is_read_twice ? 2u : 1u);
    }
  }
}

bool WindowQueue::take(Window& window) {
  while (open_ != nullptr || next_group_ < run_.groups.size()) {
    if (open_ == nullptr) {
      open_ =
          make_group(run_.values, run_.groups[next_group_++], run_.shards, run_.sink, run_.memory);
    }
    if (!take_of_group(*open_, window)) {
      open_.reset();
      continue;
    }
    window.group = open_;
    if (open_->member == open_->members.size()) {
      // All windows have been handed out. A measured group is handed out again for encoding.
      if (window.step == Window::Step::measure) ++measuring_;
      open_.reset();
    }
    return true;
  }
  return false;
}

std::uint64_t WindowQueue::elements_per_window(const GroupMember& member) const {
  const Value& value = run_.values[member.value];
  std::uint64_t bytes = window_bytes_of(value, run_.budget.window_bytes);
  if (member.form) return elements_in(*member.form, bytes);
  if (value.goes_to_device()) bytes = std::min(bytes, run_.budget.ring.slot_bytes);
  const std::uint64_t elements = bytes / 8 * 64 / bits(value.dtype);
  return std::max(elements / whole_elements, std::uint64_t{1}) * whole_elements;
}

// Takes the next window of a group and advances the group's cursor. A small group is one window.
bool WindowQueue::take_of_group(Group& group, Window& window) const {
  if (group.member == group.members.size()) return false;
  GroupMember& member = group.members[group.member];
  window = {};
  const bool is_new = group.member == 0 && member.next == 0 && !group.is_measured;
  if (member.form && is_new && group.number_bytes <= run_.budget.window_bytes) {
    window.step = Window::Step::whole;
    group.member = group.members.size();
    return true;
  }
  const bool measures = !group.amax.empty() && !group.is_measured;
  window.step = !member.form ? Window::Step::copy
                : measures   ? Window::Step::measure
                             : Window::Step::encode;
  window.member = group.member;
  window.begin = member.next;
  window.end = window.begin + std::min(member.elements - window.begin, elements_per_window(member));
  member.next = window.end;
  if (member.next == member.elements) ++group.member;
  if (measures) group.measuring += 1;
  return true;
}

bool WindowQueue::next(Window& window, const std::atomic<bool>& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.load(std::memory_order_relaxed)) {
    if (!ready_.empty()) {
      const std::shared_ptr<Group> group = ready_.front();
      static_cast<void>(take_of_group(*group, window));
      window.group = group;
      if (group->member == group->members.size()) ready_.pop_front();
      return true;
    }
    if (take(window)) return true;
    if (measuring_ == 0) return false;
    changed_.wait_for(lock, patience);
  }
  return false;
}

void WindowQueue::measured(const Window& window, std::span<const float> amax,
                           std::span<const ExactScales> exact) {
  const std::lock_guard lock(mutex_);
  Group& group = *window.group;
  for (std::size_t i = 0; i < group.amax.size(); ++i) {
    group.amax[i] = std::max(group.amax[i], amax[i]);
  }
  for (std::size_t i = 0; i < group.exact.size(); ++i) group.exact[i].join(exact[i]);
  if (--group.measuring > 0 || group.member < group.members.size()) return;
  group.is_measured = true;
  choose_exact_scales(group);
  group.member = 0;
  for (GroupMember& member : group.members) member.next = 0;
  ready_.push_back(window.group);
  --measuring_;
  changed_.notify_all();
}

bool WindowQueue::is_last(const Window& window) {
  const std::lock_guard lock(mutex_);
  GroupMember& member = window.group->members[window.member];
  member.left -= window.end - window.begin;
  return member.left == 0;
}

}  // namespace loadstone
