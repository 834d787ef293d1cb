#include "convert/windows.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

#include "execute/shard_files.h"
#include "execute/value_reader.h"

namespace loadstone {

namespace {

// What is in order gains nothing from larger windows, and loses the nearer caches.
constexpr std::uint64_t straight_bytes_max = 2 << 20;
// How long a thread waits for others before it looks whether the work is stopped.
constexpr std::chrono::milliseconds patience{20};

std::uint64_t bytes_per_window(const Conversion& conversion, const PlannedTarget& target) {
  return is_turned(target) ? conversion.window_bytes
                           : std::min(conversion.window_bytes, straight_bytes_max);
}

std::uint64_t elements_per_window(const Conversion& conversion, const PlannedTarget& target) {
  const std::uint64_t elements = bytes_per_window(conversion, target) / 8 * 64 / bits(target.dtype);
  return elements / whole_elements * whole_elements;
}

}  // namespace

bool is_turned(const PlannedTarget& target) noexcept {
  // Dimensions come by target stride.
  return std::ranges::any_of(target.recipe.boxes, [](const Box& box) {
    return !std::ranges::is_sorted(box.dims, [](const BoxDim& a, const BoxDim& b) {
      return a.source_stride > b.source_stride;
    });
  });
}

WindowQueue::WindowQueue(const Conversion& conversion, std::vector<bool> wanted)
    : conversion_(conversion), wanted_(std::move(wanted)) {
  for (const OutputFile& file : conversion.files) bytes_left_.push_back(file.data_bytes);
  open_file();
}

void WindowQueue::open_file() {
  units_.clear();
  unit_ = 0;
  element_ = 0;
  is_first_ = true;
  while (file_ < wanted_.size() && !wanted_[file_]) ++file_;
  if (file_ == conversion_.files.size()) return;
  const Plan& plan = conversion_.plan;
  const auto& tensors = conversion_.files[file_].tensors;
  // Parts of one target are together, and those of partners.
  std::map<std::pair<std::string_view, std::uint32_t>, std::size_t> unit_of;
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    const PlannedTarget& target = plan.targets[tensors[i].target];
    if (!target.quantization) {
      if (tensors[i].end > tensors[i].begin) units_.push_back({.tensors = {i}});
      continue;
    }
    const std::string_view group = target.quantization->group;
    const auto key = std::pair(group, group.empty() ? tensors[i].target : 0);
    const auto [known, is_new] = unit_of.emplace(key, units_.size());
    if (is_new) units_.push_back({.is_quantized = true});
    units_[known->second].tensors.push_back(i);
  }
  const auto place = [&](std::uint32_t i) {
    return std::tuple(first_place(plan, plan.targets[tensors[i].target]), tensors[i].target, i);
  };
  for (Unit& unit : units_) std::ranges::sort(unit.tensors, {}, place);
  std::ranges::sort(units_, {}, [&](const Unit& unit) { return place(unit.tensors.front()); });
}

// The next of the open file's units; false when there is none left in any file.
bool WindowQueue::take(Window& window) {
  while (file_ < conversion_.files.size()) {
    if (unit_ < units_.size()) {
      if (!units_[unit_].is_quantized) return take_copy(window);
      if (open_ == nullptr) {
        open_ = make_group(conversion_, static_cast<std::uint32_t>(file_), units_[unit_].tensors);
      }
      if (take_of_group(*open_, window)) {
        window.group = open_;
        if (window.step != Window::Step::whole && open_->member < open_->members.size()) {
          return true;
        }
        // All is handed out. What was measured comes again, to be encoded.
        if (window.step == Window::Step::measure) ++measuring_;
        open_.reset();
        ++unit_;
        return true;
      }
    }
    if (units_.empty() && std::exchange(is_first_, false)) {
      window = {.file = static_cast<std::uint32_t>(file_)};
      return true;
    }
    ++file_;
    open_file();
  }
  return false;
}

bool WindowQueue::take_copy(Window& window) {
  const OutputFile& file = conversion_.files[file_];
  const OutputTensor& tensor = file.tensors[units_[unit_].tensors.front()];
  const PlannedTarget& target = conversion_.plan.targets[tensor.target];
  const std::uint64_t elements = target.shape.numel().value_or(0);
  const Encoding encoding = target.dtype;
  window = {.file = static_cast<std::uint32_t>(file_), .target = tensor.target};
  window.tensor = &tensor;
  window.begin = element_;
  window.end = element_ + std::min(elements - element_, elements_per_window(conversion_, target));
  window.file_offset =
      file.header_bytes + tensor.begin + encoding.byte_count(window.begin).value_or(0);
  window.byte_count = encoding.byte_count(window.end - window.begin).value_or(0);
  element_ = window.end;
  if (element_ == elements) {
    ++unit_;
    element_ = 0;
  }
  return true;
}

// The next window of a group, whose cursor moves on. A small group is one.
bool WindowQueue::take_of_group(Group& group, Window& window) {
  if (group.member == group.members.size()) return false;
  GroupMember& member = group.members[group.member];
  window = {.file = group.file, .target = member.target};
  const bool is_new = group.member == 0 && member.next == 0 && !group.is_measured;
  if (is_new && group.numbers <= conversion_.window_bytes) {
    window.step = Window::Step::whole;
    group.member = group.members.size();
    return true;
  }
  const bool measures = !group.amax.empty() && !group.is_measured;
  window.step = measures ? Window::Step::measure : Window::Step::encode;
  window.member = group.member;
  window.begin = member.next;
  const PlannedTarget& target = conversion_.plan.targets[member.target];
  window.end =
      std::min(member.form.elements,
               window.begin + elements_in(member.form, bytes_per_window(conversion_, target)));
  member.next = window.end;
  if (member.next == member.form.elements) ++group.member;
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

void WindowQueue::measured(const Window& window, std::span<const float> amax) {
  const std::lock_guard lock(mutex_);
  Group& group = *window.group;
  for (std::size_t i = 0; i < group.amax.size(); ++i) {
    group.amax[i] = std::max(group.amax[i], amax[i]);
  }
  if (--group.measuring > 0 || group.member < group.members.size()) return;
  group.is_measured = true;
  group.member = 0;
  for (GroupMember& member : group.members) member.next = 0;
  ready_.push_back(window.group);
  --measuring_;
  changed_.notify_all();
}

bool WindowQueue::encoded(const Window& window) {
  const std::lock_guard lock(mutex_);
  GroupMember& member = window.group->members[window.member];
  member.left -= window.end - window.begin;
  return member.left == 0;
}

bool WindowQueue::finish(const Window& window) {
  const std::lock_guard lock(mutex_);
  std::uint64_t& left = bytes_left_[window.file];
  left -= window.byte_count;
  return left == 0;
}

}  // namespace loadstone
