#include "convert/windows.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "execute/value_reader.h"

namespace loadstone {

namespace {

// What is in order gains nothing from larger windows, and loses the nearer caches.
constexpr std::uint64_t straight_bytes_max = 2 << 20;

// Where the target's first source stands.
std::pair<std::uint32_t, std::uint64_t> place_of(const Plan& plan, const PlannedTarget& target) {
  if (target.recipe.boxes.empty()) return {0, 0};
  const TensorInfo& source = plan.catalog->tensors()[target.recipe.boxes.front().source];
  return {source.shard, source.offset_begin};
}

std::uint64_t elements_per_window(const Conversion& conversion, const PlannedTarget& target) {
  const std::uint64_t bytes = is_turned(target)
                                  ? conversion.window_bytes
                                  : std::min(conversion.window_bytes, straight_bytes_max);
  const std::uint64_t elements = bytes / 8 * 64 / bits(target.dtype);
  return elements / ValueReader::whole_elements * ValueReader::whole_elements;
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
  order_.clear();
  tensor_ = 0;
  element_ = 0;
  is_first_ = true;
  while (file_ < wanted_.size() && !wanted_[file_]) ++file_;
  if (file_ == conversion_.files.size()) return;
  const auto& tensors = conversion_.files[file_].tensors;
  for (std::uint32_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].end > tensors[i].begin) order_.push_back(i);
  }
  const Plan& plan = conversion_.plan;
  std::ranges::sort(order_, {}, [&](std::uint32_t i) {
    return std::tuple(place_of(plan, plan.targets[tensors[i].target]), i);
  });
}

bool WindowQueue::next(Window& window) {
  const std::lock_guard lock(mutex_);
  while (file_ < conversion_.files.size() && tensor_ == order_.size()) {
    if (order_.empty() && std::exchange(is_first_, false)) {
      window = {.file = static_cast<std::uint32_t>(file_)};
      return true;
    }
    ++file_;
    open_file();
  }
  if (file_ == conversion_.files.size()) return false;
  const OutputFile& file = conversion_.files[file_];
  const OutputTensor& tensor = file.tensors[order_[tensor_]];
  const PlannedTarget& target = conversion_.plan.targets[tensor.target];
  const std::uint64_t elements = target.shape.numel().value_or(0);
  window.file = static_cast<std::uint32_t>(file_);
  window.target = tensor.target;
  window.begin = element_;
  window.end = element_ + std::min(elements - element_, elements_per_window(conversion_, target));
  const Encoding encoding = target.dtype;
  window.file_offset =
      file.header_bytes + tensor.begin + encoding.byte_count(window.begin).value_or(0);
  window.byte_count = encoding.byte_count(window.end - window.begin).value_or(0);
  element_ = window.end;
  if (element_ == elements) {
    ++tensor_;
    element_ = 0;
  }
  return true;
}

bool WindowQueue::finish(const Window& window) {
  const std::lock_guard lock(mutex_);
  std::uint64_t& left = bytes_left_[window.file];
  left -= window.byte_count;
  return left == 0;
}

}  // namespace loadstone
