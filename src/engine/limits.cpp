#include "engine/limits.h"

#include <algorithm>
#include <initializer_list>
#include <set>
#include <tuple>
#include <utility>

#include "base/checked.h"
#include "boxes/check_boxes.h"
#include "boxes/dims.h"
#include "boxes/merges.h"
#include "codec/encode.h"
#include "engine/box_read.h"

namespace loadstone {

namespace {

// A cast reads its source again, so the window should fit the second-level cache.
constexpr std::uint64_t staged_window_bytes = 1 << 20;
// Windows in the order of the file do not get faster above this size.
constexpr std::uint64_t straight_window_bytes = 2 << 20;
constexpr std::uint64_t staging_bytes_least = 32 << 10;
// Values that are encoded together should stay in the L1 and L2 caches.
constexpr std::uint64_t piece_bytes_wanted = 1 << 20;
// Upper limit on the memory for one copy of a box, its dimensions and the state of an iteration
// over the box.
constexpr std::uint64_t bytes_of_a_box = 256;
constexpr std::uint64_t boxes_uncounted = 64;

std::uint64_t bytes_of(std::uint64_t elements, Dtype dtype) {
  return bytes_of(ElementRange{0, elements}, dtype).end;
}

std::uint64_t sum(std::initializer_list<std::uint64_t> numbers) {
  std::uint64_t all = 0;
  for (const std::uint64_t each : numbers) all = saturating_add(all, each);
  return all;
}

// Rounds up to whole pages, because each component begins on a new page.
std::uint64_t pages(std::uint64_t bytes) {
  return bytes > UINT64_MAX - page_bytes ? bytes : round_up(bytes, page_bytes);
}

// Returns true if the value's elements have a different order than in a source. Each window then
// reads through more of the source than it uses.
bool is_transposed(const Value& value) noexcept {
  // Dimensions are sorted by target stride.
  return std::ranges::any_of(value.boxes, [](const Box& box) {
    return !std::ranges::is_sorted(box.dims, std::greater(), &BoxDim::source_stride);
  });
}

// Returns the largest useful window. A transposed source is read again for each window, so larger
// windows are cheaper.
std::uint64_t largest_window(bool transposed, std::uint64_t window_bytes) {
  return transposed ? window_bytes : std::min(window_bytes, straight_window_bytes);
}

// `has_place` is true if components are written directly to their final memory.
std::uint64_t held_bytes_of(const QuantizedLayout& form, bool has_place) {
  std::uint64_t bytes = form.scratch_bytes;
  if (form.needs_amax) bytes += form.stack * sizeof(float);
  if (form.needs_amax && form.exact_first) {
    bytes += form.stack * (sizeof(ExactScales) + sizeof(float));
  }
  if (has_place) return bytes;
  for (std::size_t i = 0; i < form.parts.size(); ++i) {
    if (is_finished_whole(form, i)) bytes += form.parts[i].byte_count();
  }
  return bytes;
}

std::uint64_t encoded_bytes_of(const QuantizedLayout& form, std::uint64_t elements) {
  std::vector<PartRange> ranges(form.parts.size());
  part_ranges(form, 0, elements, ranges);
  std::uint64_t bytes = 0;
  for (const PartRange& range : ranges) bytes += aligned_part(range.size());
  // The codes are decoded again, to measure their loss.
  return bytes + (form.exact_first ? elements * sizeof(float) : 0);
}

}  // namespace

std::uint64_t parts_bytes_max(const PreparedDecoder& form, std::uint64_t slot_bytes) noexcept {
  const std::uint64_t wanted = std::max(staged_window_bytes, 2 * form.decoder->bytes_of_one());
  return std::min(slot_bytes - slot_bytes / 2, wanted);
}

WindowLimits window_limits(std::uint64_t slot_bytes, std::uint64_t chunk_bytes) noexcept {
  WindowLimits limits;
  limits.direct_bytes = std::min(chunk_bytes, slot_bytes);
  limits.staged_bytes = std::min(limits.direct_bytes, staged_window_bytes);
  limits.transposed_bytes = slot_bytes;
  limits.decoded_bytes = slot_bytes / 2 / element_bytes_max * element_bytes_max;
  return limits;
}

std::uint64_t window_bytes_of(const Value& value, std::uint64_t window_bytes) noexcept {
  if (value.is_filled_in_place()) return straight_window_bytes;  // needs no additional memory
  return largest_window(is_transposed(value), window_bytes);
}

std::uint64_t elements_in(const QuantizedLayout& form, std::uint64_t bytes) noexcept {
  const std::uint64_t step = form.step_elements();
  const std::uint64_t elements = bytes / element_bytes(form.dtype) / step * step;
  return std::min(std::max(elements, step), form.elements);
}

// A window that is read directly into its destination may also contain staged pieces. In the slot,
// they have the same offsets as in the window.
Slot Limits::Staged::slot(std::uint64_t most, std::uint64_t chunk_bytes) const noexcept {
  const WindowLimits limits = window_limits(most, chunk_bytes);
  std::uint64_t used = 0;
  if (is_mixed && bytes > 0) used = limits.direct_bytes;
  if (is_cast) used = std::max(used, limits.staged_bytes);
  if (is_transposed) used = std::max(used, limits.transposed_bytes);
  if (parts_bytes > 0) {
    const std::uint64_t window = is_transposed ? limits.transposed_bytes : limits.staged_bytes;
    used = std::max(used, std::min(window, limits.decoded_bytes)) + pages(parts_bytes);
  }
  return {.bytes = most, .used_bytes = std::min(most, pages(used))};
}

Limits::Limits(const ValueSet& values, std::uint64_t pinned_bytes_max)
    : values_(values), pinned_bytes_max_(pinned_bytes_max) {
  std::map<std::string_view, std::size_t> shared;
  std::set<std::tuple<std::string_view, Dtype, bool, bool, std::vector<std::uint64_t>>> kinds;
  for (const Value& value : values.list) {
    if (value.making == Making::none || value.is_filled_in_place()) continue;
    QuantizedLayout form;
    const bool is_quantized =
        value.quantization != nullptr &&
        !prepare_quantization(*value.quantization, *value.shape, value.dtype, form);
    const bool is_whole = value.making == Making::in_order;
    const std::size_t first = stretches_.size();
    if (value.merge != nullptr) {
      add_merge(value);
    } else {
      add_value(value, is_whole ? whole_ : windows_);
    }
    if (is_whole) continue;
    has_device_ = has_device_ || value.goes_to_device();
    has_host_windows_ = has_host_windows_ || is_quantized || !value.goes_to_device();
    needs_encoded_ = needs_encoded_ || (is_quantized && (!value.has_place || form.exact_first));
    boxes_most_ = std::max<std::uint64_t>(boxes_most_, value.boxes.size());
    add_windows(value, is_quantized ? &form : nullptr, bytes_since(first), shared);
    if (is_quantized &&
        kinds
            .emplace(value.quantization->encoding, value.dtype, form.exact_first,
                     value.quantization->importance != nullptr, value.shape->extents())
            .second) {
      forms_.push_back(std::move(form));
    }
  }
  windows_.bytes_least = std::max(pages(windows_.bytes_least), staging_bytes_least);
  std::ranges::sort(groups_, std::ranges::greater(), &Group::held_bytes);
  count_reads();
}

std::uint64_t Limits::bytes_since(std::size_t first) const {
  std::vector<CountedBytes> ranges;
  for (std::size_t i = first; i < stretches_.size(); ++i) ranges.push_back(stretches_[i].at);
  return counted_once(std::move(ranges));
}

std::uint64_t Limits::bytes_to_read(const Budget& budget) const noexcept {
  std::uint64_t bytes = bytes_to_read_;
  for (const Group& group : groups_) {
    const bool is_again = group.is_measured && group.value_bytes > budget.window_bytes;
    bytes = sum({bytes, group.statistics_bytes, is_again ? group.pass_bytes : 0});
  }
  return bytes;
}

void Limits::add_windows(const Value& value, const QuantizedLayout* form, std::uint64_t pass_bytes,
                         std::map<std::string_view, std::size_t>& shared) {
  std::size_t index = groups_.size();
  if (form != nullptr && shares_scale(*value.quantization, *form)) {
    index = shared.try_emplace(value.quantization->group, index).first->second;
  }
  if (index == groups_.size()) groups_.emplace_back();
  Group& group = groups_[index];
  const std::uint64_t bytes = aligned_part(bytes_of(value.elements(), value.dtype));
  group.value_bytes = saturating_add(group.value_bytes, bytes);
  window_bytes_ = saturating_add(window_bytes_, bytes);
  if (value.goes_to_device()) device_bytes_ = saturating_add(device_bytes_, bytes);
  ++window_values_;
  group.pass_bytes = saturating_add(group.pass_bytes, pass_bytes);
  if (value.merge != nullptr) {
    const std::uint64_t again = saturating_mul(measuring_passes(*value.merge), pass_bytes);
    group.statistics_bytes = saturating_add(group.statistics_bytes, again);
  }
  if (form == nullptr) {
    group.has_large_windows = is_transposed(value);
    return;
  }
  group.has_large_windows = true;
  group.is_measured = group.is_measured || form->needs_amax;
  group.step_bytes = std::max(group.step_bytes, form->step_bytes());
  group.held_bytes = saturating_add(group.held_bytes, held_bytes_of(*form, value.has_place));
  window_least_ = std::max(window_least_, pages(form->step_bytes()));
}

void Limits::add_value(const Value& value, Staged& staged) {
  std::uint64_t bytes = 0;
  for (const Box& box : value.boxes) bytes = saturating_add(bytes, add_box(value, box, staged));
  staged.bytes = saturating_add(staged.bytes, bytes);
  const bool has_holes = value.boxes.size() > 1 && bytes > 0;
  staged.value_bytes = has_holes ? UINT64_MAX : std::max(staged.value_bytes, bytes);
}

void Limits::add_merge(const Value& value) {
  const Merge& merge = *value.merge;
  const std::uint64_t elements = value.elements();
  // The computation rejects an invalid merge.
  if (check_merge(merge, elements, values_.tensors(), values_.decodings)) return;
  Value operand = {.shape = value.shape, .dtype = Dtype::f32, .boxes = value.boxes};
  add_value(operand, windows_);
  for_each_operand(merge, [&](const Operand& each) {
    operand.boxes = each.boxes;
    boxes_most_ = std::max<std::uint64_t>(boxes_most_, each.boxes.size());
    add_value(operand, windows_);
  });
  windows_.value_bytes = UINT64_MAX;  // several values are read in turn
  windows_.is_repeated = true;
  const MergeSizes sizes = merge_sizes(merge, elements);
  const std::array parts = {sizes.number_bytes(), sizes.right_bytes(), sizes.count_bytes()};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    merge_parts_[i] = std::max(merge_parts_[i], pages(parts[i]));
  }
  merge_bytes_ = sum({merge_parts_[0], merge_parts_[1], merge_parts_[2]});
}

// Records the bytes that the box reads. Returns the number of staged bytes.
std::uint64_t Limits::add_box(const Value& value, const Box& box, Staged& staged) {
  PreparedDecoder form;
  const auto read = box_read(values_, box, value.dtype, form);
  if (!read) return 0;
  const bool is_decoded = read->decoding != nullptr;
  const ElementRange all = read->elements();
  auto next = static_cast<std::ptrdiff_t>(stretches_.size());
  std::uint64_t bytes = 0;
  visit_sources(values_, *read, form, all, [&](std::uint32_t source, ByteRange range) {
    bytes = saturating_add(bytes, range.size());
    const std::uint32_t shard = values_.tensors()[source].shard;
    stretches_.push_back({.at = {shard, range.begin, range.end, range.size()},
                          .staged = is_decoded ? nullptr : &staged,
                          .is_direct = read->is_direct});
  });
  if (read->run.outer_dims > 0) {
    const ElementRange run = {all.begin, all.begin + read->run.elements};
    visit_sources(values_, *read, form, run, [&](std::uint32_t, ByteRange range) {
      const auto its =
          std::find_if(stretches_.begin() + next, stretches_.end(),
                       [&](const Stretch& each) { return each.at.begin == range.begin; });
      its->at.bytes = std::min(its->at.bytes, saturating_mul(read->runs(), range.size()));
      next = its - stretches_.begin() + 1;
    });
  }
  const std::uint64_t least = is_decoded ? decoding_bytes_least(form) : read->source_bytes;
  staged.bytes_least = std::max(staged.bytes_least, least);
  if (read->is_direct) {
    staged.is_mixed = true;
    return 0;
  }
  staged.is_transposed = staged.is_transposed || read->is_transposed;
  staged.is_repeated = staged.is_repeated || read->is_transposed || is_decoded;
  if (!is_decoded) {
    staged.is_cast = staged.is_cast || !read->is_transposed;
    return bytes;
  }
  staged.parts_bytes = std::max(staged.parts_bytes, parts_bytes_max(form, UINT64_MAX));
  return sum({(all.end - all.begin) * read->source_bytes, bytes, bytes});
}

// Bytes that are read directly are also staged if other boxes need some of them. Holes between
// staged bytes are read too.
void Limits::count_reads() {
  std::ranges::sort(stretches_, {}, &Stretch::at);
  ReadCount count;
  const Stretch* farthest = nullptr;
  const auto stage = [](const Stretch& each) {
    if (!each.is_direct) return;
    const std::uint64_t bytes = each.at.end - each.at.begin + staged_hole_bytes_max;
    each.staged->bytes = saturating_add(each.staged->bytes, bytes);
    each.staged->value_bytes = UINT64_MAX;
  };
  for (const Stretch& next : stretches_) {
    count.add(next.at);
    if (farthest != nullptr && farthest->at.shard != next.at.shard) farthest = nullptr;
    const std::uint64_t known = farthest != nullptr ? farthest->at.end : next.at.begin;
    if (next.at.begin < known) {
      stage(*farthest);
      stage(next);
    } else if (next.staged != nullptr && !next.is_direct) {
      next.staged->bytes = saturating_add(next.staged->bytes,
                                          std::min(next.at.begin - known, staged_hole_bytes_max));
    }
    if (farthest == nullptr || next.at.end > known) farthest = &next;
  }
  bytes_to_read_ = count.total();
  stretches_ = {};
}

std::uint64_t Limits::box_bytes() const noexcept {
  return boxes_most_ <= boxes_uncounted ? 0 : pages(boxes_most_ * bytes_of_a_box);
}

// Returns an upper limit on the number of windows, including those that are only measured.
std::uint64_t Limits::window_count(std::uint64_t window_bytes) const noexcept {
  const std::uint64_t once =
      window_values_ + window_bytes_ / std::max(window_bytes / 2, page_bytes);
  return saturating_add(once, once);
}

// Some threads may still read whole values while others make windows.
std::uint64_t Limits::bytes_held(const Budget& budget) const {
  const std::uint64_t whole = std::min(budget.threads * budget.whole.used_bytes, whole_.bytes);
  const std::uint64_t threads =
      std::min(std::uint64_t{budget.threads}, window_count(budget.window_bytes));
  std::uint64_t windows = threads * budget.window_thread_bytes();
  // Each value is read once, or twice if it is measured before it is encoded.
  if (!windows_.is_repeated) {
    const std::uint64_t once = saturating_add(window_bytes_, windows_.bytes);
    windows = std::min(windows, sum({once, once, threads * budget.encoded_bytes}));
  }
  const std::uint64_t moved =
      std::min(saturating_add(whole, windows), budget.threads * budget.thread_bytes());
  return sum({moved, budget.held_bytes, budget.ring.bytes(), threads * box_bytes()});
}

std::uint64_t Limits::held_bytes(unsigned threads) const {
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < groups_.size() && i <= threads; ++i) {
    bytes = saturating_add(bytes, groups_[i].held_bytes);
  }
  return pages(bytes);
}

// Returns the maximum size of an encoded piece.
std::uint64_t Limits::encoded_bytes(std::uint64_t piece_bytes) const {
  std::uint64_t bytes = 0;
  if (!needs_encoded_) return 0;  // pieces are encoded directly into their destination
  for (const QuantizedLayout& form : forms_) {
    bytes = std::max(bytes, encoded_bytes_of(form, elements_in(form, piece_bytes)));
  }
  return pages(bytes);
}

// Returns the number of windows per thread: one for decoded values, and two for copies to a device.
std::uint64_t Limits::windows_in_hand() const noexcept {
  return (has_host_windows_ ? 1u : 0u) + (has_device_ ? 2u : 0u);
}

std::uint64_t Limits::thread_bytes_least() const {
  std::uint64_t least = whole_.bytes_least;
  if (groups_.empty()) return least;
  if (has_device_) least += 2 * window_least_;
  return std::max(least, windows_in_hand() * window_least_ + encoded_bytes(window_least_) +
                             merge_bytes_ + windows_.bytes_least);
}

// Returns the size of the largest window of this run, at most `window_bytes`.
std::uint64_t Limits::window_use(std::uint64_t window_bytes) const {
  std::uint64_t use = 0;
  for (const Group& group : groups_) {
    const std::uint64_t most = std::max(largest_window(group.has_large_windows, window_bytes),
                                        std::min(group.step_bytes, window_bytes));
    use = std::max(use, std::min(group.value_bytes, most));
  }
  return pages(use);
}

// Returns the maximum slot size that keeps the ring below the limit of pinned memory, which cannot
// be paged out.
std::uint64_t Limits::slot_bytes_max(unsigned threads) const noexcept {
  if (pinned_bytes_max_ == UINT64_MAX) return UINT64_MAX;
  const std::uint64_t bytes = pinned_bytes_max_ / (2 * threads);
  return std::max(bytes / page_bytes * page_bytes, window_bytes_least);
}

// `use` is the size of the largest window. Small values share slots.
Ring Limits::ring(unsigned threads, std::uint64_t window_bytes, std::uint64_t use) const {
  const std::uint64_t slot_most = slot_bytes_max(threads);
  const std::uint64_t count = std::clamp<std::uint64_t>(window_count(window_bytes), 1, 2 * threads);
  const std::uint64_t shared = std::min(batch_bytes, pages(ceil_div(device_bytes_, count)));
  const std::uint64_t slot = std::max({use, page_bytes, std::min(shared, window_bytes)});
  return {static_cast<unsigned>(count), std::min(slot, slot_most)};
}

// Divides a thread's memory, after the part for merges: one half for windows, and one half for
// staging their sources.
Budget Limits::share(unsigned threads, std::uint64_t each, std::uint64_t chunk_bytes) const {
  Budget budget = {.threads = threads, .chunk_bytes = chunk_bytes, .merge_bytes = merge_bytes_};
  budget.held_bytes = held_bytes(threads);
  std::uint64_t whole_bytes_max = std::min(each, std::max(2 * chunk_bytes, whole_.bytes_least));
  if (groups_.empty()) {
    budget.whole = whole_.slot(whole_bytes_max, chunk_bytes);
    return budget;
  }
  const std::uint64_t whole_and_ring = each;
  each -= std::min(each, merge_bytes_);  // the minimum may be larger than `each`
  const std::uint64_t staging_least = windows_.bytes_least;
  const std::uint64_t in_hand = windows_in_hand();
  std::uint64_t piece = std::max(window_least_, std::min(piece_bytes_wanted, each / 4 / in_hand));
  if (encoded_bytes(piece) + in_hand * piece + staging_least > each) piece = window_least_;
  budget.piece_bytes = piece;
  budget.encoded_bytes = encoded_bytes(piece);
  const std::uint64_t rest = each - budget.encoded_bytes;
  std::uint64_t window = std::clamp(rest / (in_hand + 1), piece, (rest - staging_least) / in_hand);
  if (has_device_) window = std::min(window, (whole_and_ring - whole_.bytes_least) / 2);
  window = window / page_bytes * page_bytes;
  budget.window_bytes = window_use(window);
  budget.numbers_bytes = has_host_windows_ ? budget.window_bytes : 0;
  if (has_device_) {
    budget.ring = ring(threads, window, budget.window_bytes);
    const std::uint64_t ring_bytes = ceil_div(budget.ring.bytes(), threads);
    whole_bytes_max = std::min(whole_bytes_max, whole_and_ring - ring_bytes);
  }
  budget.whole = whole_.slot(whole_bytes_max, chunk_bytes);
  budget.staging = windows_.slot((rest - in_hand * window) / page_bytes * page_bytes, chunk_bytes);
  budget.staging.used_bytes = std::min(budget.staging.used_bytes, windows_.value_bytes);
  return budget;
}

Budget Limits::budget(const LimitOptions& options) const {
  const std::uint64_t least = std::max<std::uint64_t>(thread_bytes_least(), 1);
  const std::uint64_t bytes = std::max(options.bytes_max, least);
  std::uint64_t threads = std::clamp<std::uint64_t>(
      bytes / std::max(options.thread_bytes_wanted, least), 1, options.threads);
  if (has_device_) {
    threads = std::clamp<std::uint64_t>(pinned_bytes_max_ / (2 * window_bytes_least), 1, threads);
  }
  while (threads > 1 && held_bytes(static_cast<unsigned>(threads)) > options.held_bytes_max) {
    --threads;
  }
  const std::uint64_t each =
      std::max(std::min(bytes / threads, std::max(options.thread_bytes_max, least)), least);
  return share(static_cast<unsigned>(threads), each, options.chunk_bytes);
}

Budget Limits::load_budget(const LimitOptions& promise, unsigned threads,
                           std::uint64_t chunk_bytes) const {
  Budget promised = budget(promise);
  const std::uint64_t most = bytes_held(promised);
  // More threads may need more memory in total. Then each thread gets less, or there are fewer
  // threads.
  for (unsigned count = threads; count > 0; --count) {
    for (const std::uint64_t bytes : {promise.bytes_max, most}) {
      const Budget wished = budget({.threads = count,
                                    .bytes_max = bytes,
                                    .held_bytes_max = promised.held_bytes,
                                    .chunk_bytes = chunk_bytes});
      if (bytes_held(wished) <= most) return wished;
    }
  }
  promised.threads = std::min(promised.threads, threads);
  return promised;
}

std::uint64_t Limits::bytes_promised(const LimitOptions& promise) const {
  return bytes_held(load_budget(promise, promise.threads));
}

}  // namespace loadstone
