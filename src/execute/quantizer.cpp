#include "execute/quantizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/ceil_div.h"
#include "base/text.h"
#include "execute/shard_files.h"
#include "execute/value_reader.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// What is read in one go stays near the caches until it is encoded.
constexpr std::uint64_t window_bytes_wanted = 1 << 20;

// Threads that wait for others look this often whether one of them has failed.
constexpr std::chrono::milliseconds stop_is_noticed_after{10};

// An empty value has one too.
std::uint64_t windows_of(std::uint64_t elements, std::uint64_t window) {
  return std::max<std::uint64_t>(ceil_div(elements, window), 1);
}

}  // namespace

Quantizer::Quantizer(const Plan& plan, const std::vector<Parts>& parts, std::uint64_t thread_bytes)
    : plan_(plan), thread_bytes_(thread_bytes) {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < plan.targets.size(); ++i) {
    if (plan.targets[i].quantization && !parts[i].empty()) order.push_back(i);
  }
  std::ranges::stable_sort(order, {},
                           [&](std::uint32_t i) { return first_place(plan, plan.targets[i]); });
  std::map<std::string, std::size_t> known;
  for (const std::uint32_t i : order) add_unit(i, parts[i], known);
  for (Group& group : groups_) size_group(group);
}

void Quantizer::add_unit(std::uint32_t i, const Parts& parts,
                         std::map<std::string, std::size_t>& known) {
  const PlannedTarget& target = plan_.targets[i];
  Unit& unit = units_.emplace_back();
  unit.target = i;
  unit.parts = parts;
  auto problem = prepare_quantization(*target.quantization, target.shape, target.dtype, unit.form);
  const std::string& shared = target.quantization->group;
  unit.group = groups_.size();
  if (!problem && unit.form.needs_amax && !shared.empty()) {
    unit.group = known.try_emplace(shared, unit.group).first->second;
  }
  if (unit.group == groups_.size()) groups_.emplace_back();
  Group& group = groups_[unit.group];
  if (!problem && !group.units.empty() && group.units[0]->form.stack != unit.form.stack) {
    problem = DecodeProblem{"others of its group are stacks of another height", target.shape.text(),
                            fmt::format("{} matrices", group.units[0]->form.stack)};
  }
  if (problem) {
    throw Error("plan.quantize", std::move(problem->message),
                {.tensor = target.name,
                 .found = std::move(problem->found),
                 .expected = std::move(problem->expected)});
  }
  group.units.push_back(&unit);
  group.bytes += unit.form.elements * element_bytes(unit.form.dtype);
  unit.window = window_of(unit.form);
  unit.left = windows_of(unit.form.elements, unit.window);
}

void Quantizer::size_group(Group& group) {
  const QuantizeForm& form = group.units[0]->form;
  group.is_measured = form.needs_amax;
  group.is_kept = group.is_measured && group.bytes <= thread_bytes_ / 2;
  if (group.is_measured) group.amax.resize(form.stack);
  bytes_total_ += group.bytes * (group.is_measured && !group.is_kept ? 2u : 1u);
  if (group.is_kept) {
    window_bytes_ = std::max(window_bytes_, group.bytes);
    return;
  }
  for (const Unit* const unit : group.units) {
    if (group.is_measured) group.measure_left += windows_of(unit->form.elements, unit->window);
    const std::uint64_t largest = std::min(unit->window, unit->form.elements);
    window_bytes_ = std::max(window_bytes_, largest * element_bytes(unit->form.dtype));
  }
}

// Half of the thread's memory is for the numbers, half for what they are made of.
std::uint64_t Quantizer::window_of(const QuantizeForm& form) const noexcept {
  const std::uint64_t bytes = std::min(window_bytes_wanted, thread_bytes_ / 2);
  const std::uint64_t step = form.step_elements();
  return std::max<std::uint64_t>(bytes / element_bytes(form.dtype) / step, 1) * step;
}

Quantizer::Window Quantizer::advance(Group& group, Cursor& cursor, Pass pass) {
  Unit& unit = *group.units[cursor.unit];
  const std::uint64_t end = std::min(cursor.next + unit.window, unit.form.elements);
  const Window window = {&group, &unit, pass, cursor.next, end};
  cursor.next = end;
  if (end == unit.form.elements) cursor = {cursor.unit + 1, 0};
  return window;
}

// Nothing where none is left, or where others have to be measured first.
std::optional<Quantizer::Window> Quantizer::next_of(Group& group) {
  const std::size_t count = group.units.size();
  if (group.encoded.unit == count) return std::nullopt;
  if (group.is_kept) {
    group.encoded.unit = count;
    return Window{&group, nullptr, Pass::both};
  }
  if (group.is_measured && group.measured.unit < count) {
    return advance(group, group.measured, Pass::measure);
  }
  if (group.measure_left > 0) return std::nullopt;
  Unit& unit = *group.units[group.encoded.unit];
  if (group.encoded.next == 0 && unit.form.scratch_bytes > 0) {
    unit.scratch = AnonymousMemory(unit.form.scratch_bytes);
  }
  return advance(group, group.encoded, Pass::encode);
}

// While others measure what a group has left, a thread goes on to the next group.
std::optional<Quantizer::Window> Quantizer::take(const std::atomic<bool>& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.load(std::memory_order_relaxed)) {
    bool is_waiting = false;
    for (std::size_t i = current_; i < groups_.size(); ++i) {
      if (const auto window = next_of(groups_[i])) return window;
      const bool is_taken = groups_[i].encoded.unit == groups_[i].units.size();
      if (!is_taken) is_waiting = true;
      if (is_taken && i == current_) ++current_;
    }
    if (!is_waiting) break;
    changed_.wait_for(lock, stop_is_noticed_after);
  }
  return std::nullopt;
}

void Quantizer::join(Group& group, std::span<const float> amax) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < amax.size(); ++i) group.amax[i] = std::max(group.amax[i], amax[i]);
  if (--group.measure_left == 0) changed_.notify_all();
}

void Quantizer::encode(Unit& unit, std::uint64_t begin, std::uint64_t end,
                       const std::byte* numbers) {
  std::vector<PartRange> ranges(unit.form.parts.size());
  part_ranges(unit.form, begin, end, ranges);
  Parts places(ranges.size());
  for (std::size_t i = 0; i < ranges.size(); ++i) places[i] = unit.parts[i] + ranges[i].begin;
  const Group& group = groups_[unit.group];
  const std::uint64_t bad =
      quantize_window(unit.form, begin, end, numbers, places, group.amax, unit.scratch.data());
  if (bad < end) {
    std::uint64_t known = unit.not_finite;
    while (bad < known && !unit.not_finite.compare_exchange_weak(known, bad)) {
    }
  }
  bytes_done_ += (end - begin) * element_bytes(unit.form.dtype);
}

void Quantizer::finish(Unit& unit) {
  finish_quantized(unit.form, unit.parts, groups_[unit.group].amax, unit.scratch.data());
  unit.scratch = AnonymousMemory();
}

// What one thread reads with, and into.
class Quantizer::Worker {
 public:
  Worker(Quantizer& all, Shards shards, std::atomic<bool>& stop)
      : all_(all),
        stop_(stop),
        reader_(all.plan_.catalog, shards, all.thread_bytes_ / 2, stop),
        numbers_(all.window_bytes_ + 1) {}

  void run() {
    while (const auto window = all_.take(stop_)) {
      if (window->pass == Pass::both) {
        do_group(*window->group);
      } else {
        do_window(*window);
      }
    }
    all_.bytes_read_ += reader_.bytes_read();
    all_.staging_bytes_ += reader_.staging_bytes_peak() + all_.window_bytes_;
  }

 private:
  // False: stopped.
  bool read(Unit& unit, std::uint64_t begin, std::uint64_t end, std::byte* to) {
    const PlannedTarget& target = all_.plan_.targets[unit.target];
    if (open_ != &unit) {
      reader_.open(
          {target.name, target.recipe.boxes, all_.plan_.decodings, target.shape, target.dtype});
      open_ = &unit;
    }
    reader_.read(begin, end, {to, (end - begin) * element_bytes(unit.form.dtype)});
    return !stop_.load(std::memory_order_relaxed);
  }

  void do_window(const Window& window) {
    Unit& unit = *window.unit;
    if (!read(unit, window.begin, window.end, numbers_.data())) return;
    if (window.pass == Pass::measure) {
      std::vector<float> amax(unit.form.stack);
      // What is not finite is reported when it is encoded.
      (void)measure_window(unit.form, window.begin, window.end, numbers_.data(), amax);
      all_.bytes_done_ += (window.end - window.begin) * element_bytes(unit.form.dtype);
      all_.join(*window.group, amax);
      return;
    }
    all_.encode(unit, window.begin, window.end, numbers_.data());
    if (--unit.left == 0) all_.finish(unit);
  }

  void do_group(Group& group) {
    std::byte* to = numbers_.data();
    for (Unit* const unit : group.units) {
      if (!read(*unit, 0, unit->form.elements, to)) return;
      (void)measure_window(unit->form, 0, unit->form.elements, to, group.amax);
      to += unit->form.elements * element_bytes(unit->form.dtype);
    }
    to = numbers_.data();
    for (Unit* const unit : group.units) {
      all_.encode(*unit, 0, unit->form.elements, to);
      all_.finish(*unit);
      to += unit->form.elements * element_bytes(unit->form.dtype);
    }
  }

  Quantizer& all_;
  std::atomic<bool>& stop_;
  ValueReader reader_;
  const AnonymousMemory numbers_;
  const Unit* open_ = nullptr;
};

void Quantizer::run(Shards shards, std::atomic<bool>& stop) {
  if (units_.empty()) return;
  Worker(*this, shards, stop).run();
}

std::vector<Finding> Quantizer::findings() const {
  std::vector<Finding> findings;
  for (const Unit& unit : units_) {
    if (unit.not_finite == UINT64_MAX) continue;
    const PlannedTarget& target = plan_.targets[unit.target];
    const bool is_of_bnb =
        unit.form.kind == QuantizeKind::bnb4 || unit.form.kind == QuantizeKind::bnb_int8;
    findings.push_back({.severity = Severity::warning,
                        .code = "q.nan",
                        .target = target.name,
                        .message = fmt::format(
                            "'{}': element {} is NaN or infinite as {}{}", printable(target.name),
                            unit.not_finite.load(),
                            unit.form.kind == QuantizeKind::bnb_int8 ? "F16" : name(target.dtype),
                            is_of_bnb ? ", and with it what is quantized beside it" : "")});
  }
  return findings;
}

}  // namespace loadstone
