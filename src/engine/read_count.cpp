#include "engine/read_count.h"

#include <algorithm>

#include "base/checked.h"

namespace loadstone {

void ReadCount::add(const CountedBytes& next) noexcept {
  if (next.shard != joint_.shard || next.begin >= joint_.end) {
    total_ = total();
    joint_ = {.shard = next.shard, .begin = next.begin, .end = next.begin};
    has_holes_ = false;
  }
  if (next != last_) joint_.bytes = saturating_add(joint_.bytes, new_bytes(next));
  if (next.end > joint_.end) {
    joint_.end = next.end;
    has_holes_ = next.bytes < next.end - next.begin;
  }
  last_ = next;
}

std::uint64_t ReadCount::new_bytes(const CountedBytes& next) const noexcept {
  if (has_holes_) return next.bytes;
  return next.end <= joint_.end ? 0 : std::min(next.bytes, next.end - joint_.end);
}

std::uint64_t ReadCount::total() const noexcept {
  return saturating_add(total_, std::min(joint_.bytes, joint_.end - joint_.begin));
}

std::uint64_t counted_once(std::vector<CountedBytes> ranges) {
  std::ranges::sort(ranges);
  ReadCount count;
  for (const CountedBytes& each : ranges) count.add(each);
  return count.total();
}

}  // namespace loadstone
