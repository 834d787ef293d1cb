#include "convert/puller.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/text.h"
#include "kernels/cast.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

std::uint64_t number_bytes(const GroupMember& member, std::uint64_t elements) {
  return elements * element_bytes(member.form.dtype);
}

// What compressed-tensors keeps of a scale. The dialect "exact" has none whose inverse is infinite.
void invert(const OutputTensor& tensor, std::span<std::byte> bytes) {
  for (std::size_t at = 0; at + sizeof(float) <= bytes.size(); at += sizeof(float)) {
    float scale = 0;
    std::memcpy(&scale, bytes.data() + at, sizeof(scale));
    const float inverse = 1.0F / scale;
    if (!std::isfinite(inverse) || !(inverse > 0)) {
      throw Error("q.scale_value",
                  "the weight is so small that its scale has no finite inverse: use --mode exact, "
                  "or --exclude it",
                  {.tensor = tensor.name,
                   .found = fmt::format("1 / {}", scale),
                   .expected = "a finite scale"});
    }
    std::memcpy(bytes.data() + at, &inverse, sizeof(inverse));
  }
}

}  // namespace

Puller::Puller(Work& work)
    : work_(work),
      reader_(work.conversion.plan.catalog, work.shards.sources(), work.conversion.staging_bytes,
              work.stop),
      buffer_(work.conversion.window_bytes),
      encoded_(work.conversion.encoded_bytes) {}

void Puller::run() {
  Window window;
  while (!work_.stop && work_.queue.next(window, work_.stop)) {
    switch (window.step) {
      case Window::Step::copy:
        copy(window);
        break;
      case Window::Step::whole:
        make_whole(window);
        break;
      case Window::Step::measure: {
        std::vector<float> amax(window.group->amax.size(), 0.0F);
        measure(window, read(window).data(), amax);
        if (!work_.stop) work_.queue.measured(window, amax);
        continue;  // nothing is written yet
      }
      case Window::Step::encode:
        window.byte_count = encode(window, read(window).data());
        break;
    }
    if (work_.stop) break;
    work_.bytes_done += window.byte_count;
    if (work_.queue.finish(window)) work_.output.finish(window.file);
  }
  work_.bytes_read += reader_.bytes_read();
  work_.staging_bytes += reader_.staging_bytes_peak() + window_bytes_peak_;
}

void Puller::open(std::uint32_t number) {
  if (open_ == number) return;
  const PlannedTarget& target = work_.conversion.plan.targets[number];
  reader_.open({.name = target.name,
                .boxes = target.recipe.boxes,
                .decodings = work_.conversion.plan.decodings,
                .shape = target.shape,
                .dtype = target.dtype});
  open_ = number;
}

void Puller::copy(const Window& window) {
  if (window.byte_count == 0) return;
  const PlannedTarget& target = work_.conversion.plan.targets[window.target];
  std::span<const std::byte> bytes;
  if (const Constant& constant = window.tensor->constant) {
    const std::uint64_t begin = Encoding(target.dtype).byte_count(window.begin).value_or(0);
    bytes = std::span(*constant).subspan(begin, window.byte_count);
  } else {
    open(window.target);
    const std::span<std::byte> piece = {buffer_.data(), window.byte_count};
    reader_.read(window.begin, window.end, piece);
    window_bytes_peak_ = std::max(window_bytes_peak_, window.byte_count);
    bytes = piece;
  }
  if (!work_.stop) work_.output.write(window.file, window.file_offset, bytes);
}

std::span<std::byte> Puller::read(const Window& window, std::uint64_t offset) {
  const GroupMember& member = window.group->members[window.member];
  open(member.target);
  const std::uint64_t bytes = number_bytes(member, window.end - window.begin);
  const std::span<std::byte> numbers = {buffer_.data() + offset, bytes};
  reader_.read(window.begin, window.end, numbers);
  window_bytes_peak_ = std::max(window_bytes_peak_, offset + bytes + encoded_.size());
  return numbers;
}

void Puller::measure(const Window& window, const std::byte* numbers, std::span<float> amax) {
  if (work_.stop) return;
  const GroupMember& member = window.group->members[window.member];
  const std::uint64_t bad = measure_window(member.form, window.begin, window.end, numbers, amax);
  if (bad < window.end) tell_not_finite(member.target, bad);
}

// Small enough to be in hand while it is measured and then encoded: nothing is read twice.
void Puller::make_whole(Window& window) {
  Group& group = *window.group;
  std::uint64_t offset = 0;
  for (window.member = 0; window.member < group.members.size(); ++window.member) {
    const GroupMember& member = group.members[window.member];
    window.begin = 0;
    window.end = member.form.elements;
    const auto numbers = read(window, offset);
    if (member.form.needs_amax) measure(window, numbers.data(), group.amax);
    if (work_.stop) return;
    offset = aligned_part(offset + numbers.size());
  }
  offset = 0;
  for (window.member = 0; window.member < group.members.size(); ++window.member) {
    const GroupMember& member = group.members[window.member];
    window.end = member.form.elements;
    window.byte_count += encode(window, buffer_.data() + offset);
    if (work_.stop) return;
    offset = aligned_part(offset + number_bytes(member, member.form.elements));
  }
}

std::uint64_t Puller::encode(const Window& window, const std::byte* numbers) {
  if (work_.stop) return 0;
  GroupMember& member = window.group->members[window.member];
  const std::uint64_t step = elements_in(member.form, work_.conversion.piece_bytes);
  std::uint64_t written = 0;
  for (std::uint64_t begin = window.begin; begin < window.end && !work_.stop;) {
    const std::uint64_t end = std::min(window.end, begin + step);
    written +=
        encode_piece(window, begin, end, numbers + number_bytes(member, begin - window.begin));
    begin = end;
  }
  if (work_.stop || !work_.queue.encoded(window)) return written;
  return written + finish_member(member, window.group->amax, window.file);
}

std::uint64_t Puller::encode_piece(const Window& window, std::uint64_t begin, std::uint64_t end,
                                   const std::byte* numbers) {
  GroupMember& member = window.group->members[window.member];
  const QuantizeForm& form = member.form;
  ranges_.assign(form.parts.size(), {});
  parts_.assign(form.parts.size(), nullptr);
  part_ranges(form, begin, end, ranges_);
  std::uint64_t offset = 0;
  for (std::size_t i = 0; i < ranges_.size(); ++i) {
    const std::uint64_t bytes = ranges_[i].end - ranges_[i].begin;
    if (bytes == 0) continue;
    parts_[i] = encoded_.data() + offset;
    offset = aligned_part(offset + bytes);
  }
  if (offset > encoded_.size()) throw Error("internal", "a piece is larger than was planned");
  const std::uint64_t bad =
      quantize_window(form, begin, end, numbers, parts_, window.group->amax, member.scratch.data());
  if (bad < end && !form.needs_amax) tell_not_finite(member.target, bad);
  std::uint64_t written = 0;
  for (std::size_t i = 0; i < ranges_.size() && !work_.stop; ++i) {
    if (parts_[i] == nullptr) continue;
    written += write(*member.parts[i], window.file, ranges_[i].begin,
                     {parts_[i], ranges_[i].end - ranges_[i].begin});
  }
  return written;
}

std::uint64_t Puller::finish_member(GroupMember& member, std::span<const float> amax,
                                    std::uint32_t file) {
  parts_.assign(member.form.parts.size(), nullptr);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!member.held[i].empty()) parts_[i] = member.held[i].data();
  }
  finish_quantized(member.form, parts_, amax, member.scratch.data());
  std::uint64_t written = 0;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i] != nullptr) written += write(*member.parts[i], file, 0, member.held[i]);
  }
  for (const OutputTensor* const tensor : member.constants) {
    const auto& bytes = *tensor->constant;
    work_.output.write(file, work_.conversion.files[file].header_bytes + tensor->begin, bytes);
    written += bytes.size();
  }
  member.scratch = AnonymousMemory();
  return written;
}

std::uint64_t Puller::write(const OutputTensor& tensor, std::uint32_t file, std::uint64_t offset,
                            std::span<std::byte> bytes) {
  if (tensor.is_inverted) invert(tensor, bytes);
  work_.output.write(file, work_.conversion.files[file].header_bytes + tensor.begin + offset,
                     bytes);
  return bytes.size();
}

void Puller::tell_not_finite(std::uint32_t number, std::uint64_t element) {
  const PlannedTarget& target = work_.conversion.plan.targets[number];
  std::string message = fmt::format("'{}': element {} is NaN or infinite, and is to become {}",
                                    printable(target.name), element, target.quantization->encoding);
  if (!work_.conversion.allow_non_finite) {
    Where where;
    where.tensor = target.name;
    where.found = fmt::format("element {} of {}", element, target.shape.text());
    throw Error("q.nan", std::move(message), std::move(where));
  }
  const std::lock_guard lock(work_.mutex);
  const auto known = std::ranges::find(work_.findings, target.name, &Finding::target);
  if (known != work_.findings.end()) return;
  work_.findings.push_back({.severity = Severity::warning,
                            .code = "q.nan",
                            .target = target.name,
                            .message = std::move(message)});
}

}  // namespace loadstone
