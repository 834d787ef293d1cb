#include "engine/job_queue.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "boxes/dims.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// Maximum pieces per job, which limits a job's memory and the time that the queue is locked.
constexpr std::size_t job_pieces_max = 2048;

bool goes_on_later(const Walk& a, const Walk& b) { return a.file_begin() > b.file_begin(); }

}  // namespace

JobQueue::JobQueue(const ValueSet& values, std::span<std::byte* const> places,
                   const WindowLimits& limits)
    : values_(values), limits_(limits) {
  for (std::uint32_t t = 0; t < places.size(); ++t) {
    const Value& value = values[t];
    if (places[t] == nullptr) continue;
    for (std::uint32_t b = 0; b < value.boxes.size(); ++b) {
      const Box& box = value.boxes[b];
      if (is_empty(box)) continue;
      const Walk walk(values, t, box);
      bytes_total_ += walk.source_bytes();
      items_.push_back({.file_begin = walk.file_begin(),
                        .shard = values.tensors()[box.source].shard,
                        .decoding = box.decoding,
                        .value = t,
                        .box = b});
    }
  }
  // The boxes of one decoding are consecutive, at the position of the decoding's first source.
  std::ranges::sort(items_, {}, [&](const Item& item) {
    const bool decoded = item.decoding != no_decoding;
    const std::uint64_t begin =
        decoded ? values.tensors()[values.decodings[item.decoding].sources[0]].offset_begin
                : item.file_begin;
    return std::tuple(item.shard, begin, decoded, item.decoding, item.file_begin, item.value,
                      item.box);
  });
}

void JobQueue::push(Walk walk) {
  open_.push_back(std::move(walk));
  std::ranges::push_heap(open_, goes_on_later);
}

Walk JobQueue::pop() {
  std::ranges::pop_heap(open_, goes_on_later);
  Walk walk = std::move(open_.back());
  open_.pop_back();
  return walk;
}

void JobQueue::open_items(std::uint64_t window_end) {
  for (; next_item_ < items_.size(); ++next_item_) {
    const Item& item = items_[next_item_];
    if (item.shard != shard_ || item.decoding != decoding_) return;
    if (item.file_begin >= window_end) return;
    push(Walk(values_, item.value, values_[item.value].boxes[item.box]));
  }
}

bool JobQueue::next(Job& job) {
  const std::lock_guard lock(mutex_);
  job.clear();
  if (open_.empty()) {
    if (next_item_ == items_.size()) return false;
    shard_ = items_[next_item_].shard;
    decoding_ = items_[next_item_].decoding;
    open_items(items_[next_item_].file_begin + 1);
  }
  // Opens boxes that begin at or before the first open box, because jobs follow the file order.
  open_items(open_.front().file_begin() + 1);
  job.shard = shard_;
  job.decoding = decoding_;
  job.begin = open_.front().file_begin();
  job.end = job.begin + open_.front().window_bytes(limits_);
  open_items(job.end);
  while (!open_.empty() && open_.front().file_begin() < job.end &&
         job.pieces.size() < job_pieces_max) {
    Walk walk = pop();
    if (!walk.take(job.begin, job.end, job)) {
      waiting_.push_back(std::move(walk));
    } else if (!walk.done()) {
      push(std::move(walk));
    }
  }
  while (!waiting_.empty()) {
    push(std::move(waiting_.back()));
    waiting_.pop_back();
  }
  // Without this check, the caller would get the same window forever.
  if (job.pieces.empty()) throw Error("internal", "a window is smaller than one element");
  return true;
}

}  // namespace loadstone
