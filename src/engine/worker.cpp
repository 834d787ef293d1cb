#include "engine/worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "base/text.h"
#include "engine/code_mover.h"
#include "engine/merge_reader.h"
#include "engine/pages.h"
#include "engine/value_reader.h"
#include "kernels/cast.h"
#include "kernels/encoding_loss.h"
#include "kernels/quantize.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

class Worker {
 public:
  explicit Worker(WindowWork& work)
      : work_(work),
        reader_(run_.values.catalog, reads_.shards, run_.budget.staging.bytes, reads_.stop,
                &run_.memory, false),
        merged_(run_.values, reader_, work.statistics, reads_.stop, run_.memory),
        mover_(run_.values, reads_.shards),
        numbers_(run_.memory, run_.budget.numbers_bytes),
        encoded_(run_.memory, run_.budget.encoded_bytes) {}

  void run();

 private:
  void copy(const Window& window);
  void make_whole(Window& window);
  void measure(const Window& window, const std::byte* numbers, std::span<float> amax,
               std::span<ExactScales> exact);
  void encode(const Window& window, const std::byte* numbers);
  void encode_piece(const Window& window, std::uint64_t begin, std::uint64_t end,
                    const std::byte* numbers);
  void encode_values(const Window& window, std::uint64_t begin, std::uint64_t end,
                     const std::byte* numbers, std::span<std::byte> room);
  CodeMover::Result move(const Window& window, std::uint64_t begin, std::uint64_t end,
                         std::span<std::byte> room);
  bool move_all(const Window& window, std::uint64_t begin, std::uint64_t end,
                std::span<std::byte> room);
  void compare(const Window& window, std::uint64_t begin, std::uint64_t end,
               const std::byte* numbers, std::byte* room);
  void finish(GroupMember& member, const Group& group);

  // Reads the values of the window into the buffer at `offset` bytes.
  std::byte* read(const Window& window, std::uint64_t offset = 0);
  void read_to(const Window& window, std::byte* to);
  [[nodiscard]] Overflow read_values(const Window& window, std::byte* to);
  void report_unencodable(const Window& window, std::uint64_t element, const std::byte* number);
  void report(std::uint32_t value, BadNumber bad);
  void check_overflow(std::uint32_t value) const;

  [[nodiscard]] static GroupMember& member_of(const Window& window) {
    return window.group->members[window.member];
  }
  [[nodiscard]] const Value& value_of(const Window& window) const {
    return run_.values[member_of(window).value];
  }
  [[nodiscard]] std::uint64_t bytes_of(const Window& window, std::uint64_t elements) const {
    return value_of(window).bytes_of(elements);
  }
  [[nodiscard]] bool is_stopped() const { return reads_.stop.load(std::memory_order_relaxed); }

  WindowWork& work_;
  const Run& run_ = work_.run;
  ReadContext& reads_ = work_.reads;
  ValueReader reader_;
  MergeReader merged_;
  CodeMover mover_;
  CountedMemory numbers_;
  CountedMemory encoded_;
  std::vector<PartRange> ranges_;
  std::vector<std::byte*> parts_;
  const Value* open_ = nullptr;
};

void Worker::run() {
  Window window;
  while (!is_stopped() && work_.queue.next(window, reads_.stop)) {
    switch (window.step) {
      case Window::Step::copy:
        copy(window);
        break;
      case Window::Step::whole:
        make_whole(window);
        break;
      case Window::Step::measure: {
        std::vector<float> amax(window.group->amax.size(), 0.0F);
        std::vector<ExactScales> exact(window.group->exact.size());
        measure(window, read(window), amax, exact);
        if (!is_stopped()) work_.queue.measured(window, amax, exact);
        break;
      }
      case Window::Step::encode:
        encode(window, member_of(window).codes ? nullptr : read(window));
        break;
    }
    window.group.reset();
  }
  reads_.bytes_read += reader_.bytes_read() + mover_.bytes_read();
}

void Worker::read_to(const Window& window, std::byte* to) {
  const Overflow overflow = read_values(window, to);
  // Overflows of measured windows are counted when the windows are read again for encoding.
  if (window.step == Window::Step::measure) return;
  reads_.overflows.add(member_of(window).value, overflow);
}

// Reads the values, and returns the count of values that became infinite or NaN in the value's
// dtype.
Overflow Worker::read_values(const Window& window, std::byte* to) {
  const Value& value = value_of(window);
  const std::uint64_t bytes = bytes_of(window, window.end - window.begin);
  if (value.constant != nullptr) {
    std::memcpy(to, value.constant->data() + bytes_of(window, window.begin), bytes);
  } else if (value.boxes.empty()) {
    value.fill(value.dtype, {to, bytes});
  } else if (value.merge != nullptr) {
    open_ = nullptr;
    const std::uint64_t bad = merged_.read(value, window.begin, window.end, {to, bytes});
    if (bad < window.end) {
      report(member_of(window).value,
             {bad, "q.nan",
              fmt::format("'{}': element {} is NaN or infinite after the merge",
                          printable(value.name), bad)});
    }
  } else {
    if (open_ != &value) {
      reader_.open(value, run_.values.decodings);
      open_ = &value;
    }
    reader_.read(window.begin, window.end, {to, bytes});
  }
  // For a merge: the overflow of its operands in F32.
  const Overflow overflow = reader_.take_overflow();
  return value.merge != nullptr ? merged_.take_overflow() : overflow;
}

std::byte* Worker::read(const Window& window, std::uint64_t offset) {
  const std::uint64_t bytes = bytes_of(window, window.end - window.begin);
  if (offset + bytes > numbers_.size()) throw Error("internal", "a window is larger than planned");
  numbers_.use(offset, offset + bytes);
  read_to(window, numbers_.data() + offset);
  return numbers_.data() + offset;
}

void Worker::copy(const Window& window) {
  GroupMember& member = member_of(window);
  const std::uint64_t offset = bytes_of(window, window.begin);
  const std::uint64_t bytes = bytes_of(window, window.end) - offset;
  if (std::byte* const place = run_.sink.place(member.value, 0)) {
    populate(place + offset, bytes);
    read_to(window, place + offset);
    if (!is_stopped()) run_.sink.made(member.value, 0, {place + offset, bytes});
  } else {
    std::byte* from = run_.sink.room(member.value, bytes);
    if (from != nullptr) {
      read_to(window, from);
    } else {
      from = read(window);
    }
    if (!is_stopped()) run_.sink.write(member.value, 0, offset, {from, bytes});
  }
  if (is_stopped()) return;
  reads_.bytes_done += bytes;
  if (!work_.queue.is_last(window)) return;
  check_overflow(member.value);
  run_.sink.finish(member.value);
}

void Worker::measure(const Window& window, const std::byte* numbers, std::span<float> amax,
                     std::span<ExactScales> exact) {
  if (is_stopped()) return;
  const GroupMember& member = member_of(window);
  const std::uint64_t bad =
      measure_window(*member.form, window.begin, window.end, numbers, amax, exact);
  if (bad < window.end) {
    report_unencodable(window, bad, numbers + bytes_of(window, bad - window.begin));
  }
  if (window.step == Window::Step::measure) {
    reads_.bytes_done += bytes_of(window, window.end - window.begin);
  }
}

// Makes a group that is small enough to stay in memory between measuring and encoding, so that no
// byte is read twice.
void Worker::make_whole(Window& window) {
  Group& group = *window.group;
  const auto each = [&](const auto& make) {
    std::uint64_t offset = 0;
    for (window.member = 0; window.member < group.members.size(); ++window.member) {
      window.end = member_of(window).elements;
      make(offset);
      if (is_stopped()) return;
      offset = aligned_part(offset + bytes_of(window, window.end));
    }
  };
  each([&](std::uint64_t offset) {
    const std::byte* const numbers = read(window, offset);
    if (member_of(window).form->needs_amax) measure(window, numbers, group.amax, group.exact);
  });
  if (is_stopped()) return;
  choose_exact_scales(group);
  each([&](std::uint64_t offset) { encode(window, numbers_.data() + offset); });
}

// Moves codes or encodes values piece by piece, so that both stay in the L1 and L2 caches.
// `numbers`: null if codes are moved.
void Worker::encode(const Window& window, const std::byte* numbers) {
  GroupMember& member = member_of(window);
  const std::uint64_t step = elements_in(*member.form, run_.budget.piece_bytes);
  for (std::uint64_t begin = window.begin; begin < window.end && !is_stopped();) {
    const std::uint64_t end = std::min(window.end, begin + step);
    encode_piece(window, begin, end,
                 numbers ? numbers + bytes_of(window, begin - window.begin) : nullptr);
    begin = end;
  }
  if (is_stopped()) return;
  const Group& group = *window.group;
  const bool was_counted_twice = numbers == nullptr && member.form->needs_amax &&
                                 group.number_bytes > run_.budget.window_bytes;
  reads_.bytes_done += bytes_of(window, window.end - window.begin) * (was_counted_twice ? 2u : 1u);
  if (work_.queue.is_last(window)) finish(member, group);
}

// `numbers`: null if codes are moved.
void Worker::encode_piece(const Window& window, std::uint64_t begin, std::uint64_t end,
                          const std::byte* numbers) {
  GroupMember& member = member_of(window);
  const QuantizedLayout& form = *member.form;
  ranges_.assign(form.parts.size(), {});
  parts_.assign(form.parts.size(), nullptr);
  part_ranges(form, begin, end, ranges_);
  std::uint64_t offset = 0;
  for (std::size_t i = 0; i < ranges_.size(); ++i) {
    if (ranges_[i].size() == 0) continue;
    if (std::byte* const place = run_.sink.place(member.value, i)) {
      parts_[i] = place + ranges_[i].begin;
      populate(parts_[i], ranges_[i].size());
      continue;
    }
    parts_[i] = encoded_.data() + offset;
    offset = aligned_part(offset + ranges_[i].size());
  }
  const std::uint64_t room_bytes = form.exact_first ? (end - begin) * sizeof(float) : 0;
  const std::span<std::byte> room(encoded_.data() + offset, room_bytes);
  offset += room_bytes;
  if (offset > encoded_.size()) throw Error("internal", "a piece is larger than planned");
  encoded_.use(0, offset);
  if (numbers != nullptr) {
    encode_values(window, begin, end, numbers, room);
  } else if (!move_all(window, begin, end, room)) {
    Window piece = window;
    piece.begin = begin;
    piece.end = end;
    encode_values(window, begin, end, read(piece), room);
  }
  for (std::size_t i = 0; i < ranges_.size() && !is_stopped(); ++i) {
    if (parts_[i] == nullptr) continue;
    const std::span<std::byte> bytes(parts_[i], ranges_[i].size());
    if (run_.sink.place(member.value, i) == nullptr) {
      run_.sink.write(member.value, i, ranges_[i].begin, bytes);
    } else if (!is_finished_whole(form, i)) {
      run_.sink.made(member.value, i, bytes);
    }
  }
}

// Encodes a piece. Blocks whose codes can be moved get them, so that the result does not depend on
// the size of pieces.
void Worker::encode_values(const Window& window, std::uint64_t begin, std::uint64_t end,
                           const std::byte* numbers, std::span<std::byte> room) {
  const Group& group = *window.group;
  GroupMember& member = member_of(window);
  const QuantizedLayout& form = *member.form;
  const std::uint64_t bad = quantize_window(form, begin, end, numbers, parts_, group.amax,
                                            member.scratch.data(), group.exact_scales);
  if (bad < end && (!form.needs_amax || member.codes != nullptr)) {
    report_unencodable(window, bad, numbers + bytes_of(window, bad - begin));
  }
  if (member.codes != nullptr) move(window, begin, end, room);
  if (run_.sink.compares()) {
    const std::uint64_t zeroed = count_zeroed_blocks(form, begin, end, numbers, parts_);
    const std::lock_guard lock(work_.mutex);
    member.loss.zeroed_blocks += zeroed;
  }
  if (form.exact_first && run_.sink.compares()) compare(window, begin, end, numbers, room.data());
}

CodeMover::Result Worker::move(const Window& window, std::uint64_t begin, std::uint64_t end,
                               std::span<std::byte> room) {
  const GroupMember& member = member_of(window);
  return mover_.move({.codes = *member.codes,
                      .form = *member.form,
                      .begin = begin,
                      .end = end,
                      .matrix_scales = window.group->exact_scales,
                      .parts = parts_,
                      .room = room});
}

// Moves the codes of a piece. Returns false if it has blocks that must be encoded.
bool Worker::move_all(const Window& window, std::uint64_t begin, std::uint64_t end,
                      std::span<std::byte> room) {
  const CodeMover::Result moved = move(window, begin, end, room);
  if (!moved.is_whole) return false;
  if (moved.first_bad < end) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    report_unencodable(window, moved.first_bad, reinterpret_cast<const std::byte*>(&nan));
  }
  if (run_.sink.compares()) {
    GroupMember& member = member_of(window);
    const std::lock_guard lock(work_.mutex);
    count_exact_window(*member.form, begin, end, member.loss);
  }
  return true;
}

// Decodes a piece into `room`, and adds its loss to that of the value. Scales of whole matrices are
// not written yet.
void Worker::compare(const Window& window, std::uint64_t begin, std::uint64_t end,
                     const std::byte* numbers, std::byte* room) {
  const Group& group = *window.group;
  GroupMember& member = member_of(window);
  const QuantizedLayout& form = *member.form;
  std::vector<std::byte> scales;
  std::vector<std::byte*> parts = parts_;
  if (form.needs_amax) {
    scales.resize(form.parts.back().byte_count());
    parts.back() = scales.data();
    finish_quantized(form, parts, group.amax, nullptr, group.exact_scales);
  }
  const std::vector<const std::byte*> codes(parts.begin(), parts.end());
  dequantize_window(form, begin, end, codes, Dtype::f32, room);
  const auto floats = [](const std::byte* at) { return reinterpret_cast<const float*>(at); };
  EncodingLoss loss;
  std::vector<float> errors(member.matrix_errors.size(), 0.0F);
  compare_window(form, begin, end, floats(numbers), floats(room), errors, loss);
  const std::lock_guard lock(work_.mutex);
  member.loss.join(loss);
  for (std::size_t i = 0; i < errors.size(); ++i) {
    member.matrix_errors[i] = std::max(member.matrix_errors[i], errors[i]);
  }
}

void Worker::finish(GroupMember& member, const Group& group) {
  check_overflow(member.value);
  parts_.assign(member.form->parts.size(), nullptr);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    std::vector<std::byte>& held = member.held[i];
    parts_[i] = held.empty() ? run_.sink.place(member.value, i) : held.data();
    // A tensor without elements may still have scales, which no window writes.
    const std::uint64_t bytes = member.form->parts[i].byte_count();
    if (member.elements == 0 && bytes > 0) std::memset(parts_[i], 0, bytes);
  }
  finish_quantized(*member.form, parts_, group.amax, member.scratch.data(), group.exact_scales);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!member.held[i].empty()) run_.sink.write(member.value, i, 0, member.held[i]);
  }
  const bool has_loss = member.form->exact_first || member.loss.zeroed_blocks > 0;
  if (has_loss && run_.sink.compares()) {
    count_matrices(member.matrix_errors, group.amax, member.loss);
    run_.sink.compared(member.value, member.loss);
  }
  run_.sink.finish(member.value);
}

// Checks a value after all of it has been read. Overflows of a merge are rejected in a load too.
void Worker::check_overflow(std::uint32_t number) const {
  const Value& value = run_.values[number];
  if (run_.values.allows_non_finite) return;
  if (!run_.refuses_casts && value.merge == nullptr) return;
  require_none(value, reads_.overflows.of(number));
}

void Worker::report_unencodable(const Window& window, std::uint64_t element,
                                const std::byte* number) {
  const GroupMember& member = member_of(window);
  const Value& made = run_.values[member.value];
  const bool has_blocks = member.form->kind == QuantizeKind::gguf_blocks;
  float value = 0;
  cast_between(made.dtype, Dtype::f32).run(number, reinterpret_cast<std::byte*>(&value), 1);
  Overflow before;  // overflow of this element alone
  if (!std::isfinite(value)) {
    Window one = window;
    std::array<std::byte, sizeof(double)> read{};
    one.begin = element;
    one.end = element + 1;
    before = read_values(one, read.data());
  }
  std::string what = fmt::format("element {} is NaN or infinite{}", element,
                                 before.spoiled > 0 ? " because of a scale" : "");
  const bool is_large = std::isfinite(value) || before.count > 0;
  if (before.count > 0) {
    what = fmt::format("element {} is {}, which is too large for {}", element,
                       std::copysign(before.largest, double{value}), name(made.dtype));
  } else if (is_large && has_blocks) {
    what = fmt::format("the scale of the block of element {} is too large for F16", element);
  } else if (is_large) {
    what = fmt::format("element {} is {}, which is too large for {}", element, value,
                       name(member.form->computed_in.value_or(made.dtype)));
  }
  report(member.value, {element, is_large ? "convert.overflow" : "q.nan",
                        fmt::format("'{}': {}; the tensor is to be quantized to {}",
                                    printable(made.name), what, made.quantization->encoding)});
}

// Reports the first unencodable element of a value.
void Worker::report(std::uint32_t number, BadNumber bad) {
  const Value& value = run_.values[number];
  if (!run_.values.allows_non_finite) {
    throw Error(std::move(bad.code), std::move(bad.message),
                {.tensor = std::string(value.name),
                 .found = fmt::format("element {} of {}", bad.element, value.shape->text())});
  }
  const std::lock_guard lock(work_.mutex);
  const auto [known, is_new] = work_.bad_numbers.try_emplace(number, bad);
  if (!is_new && bad.element < known->second.element) known->second = std::move(bad);
}

}  // namespace

void make_windows(WindowWork& work) { Worker(work).run(); }

std::vector<Finding> findings_of(const WindowWork& work) {
  std::vector<Finding> findings = work.reads.overflows.findings(work.run.values);
  for (const auto& [value, bad] : work.bad_numbers) {
    findings.push_back({.severity = Severity::warning,
                        .code = bad.code,
                        .target = std::string(work.run.values[value].name),
                        .message = bad.message});
  }
  return findings;
}

}  // namespace loadstone
