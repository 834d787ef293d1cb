#include "execute/quantizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "execute/value_reader.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

// What is read in one go stays near the caches until it is encoded.
constexpr std::uint64_t window_bytes_wanted = 1 << 20;

std::uint64_t width(Dtype dtype) { return bits(dtype) / 8; }

// Where the target's first source stands, so that files are read from front to back.
std::tuple<std::uint32_t, std::uint64_t> place_of(const Plan& plan, const PlannedTarget& target) {
  std::tuple<std::uint32_t, std::uint64_t> first = {UINT32_MAX, UINT64_MAX};
  for (const Box& box : target.recipe.boxes) {
    const TensorInfo& source = plan.catalog->tensors()[box.source];
    first = std::min(first, {source.shard, source.offset_begin});
  }
  return first;
}

}  // namespace

Quantizer::Quantizer(const Plan& plan, const std::vector<Parts>& parts, std::uint64_t thread_bytes)
    : plan_(plan), thread_bytes_(thread_bytes) {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < plan.targets.size(); ++i) {
    if (plan.targets[i].quantization && !parts[i].empty()) order.push_back(i);
  }
  std::ranges::stable_sort(order, {},
                           [&](std::uint32_t i) { return place_of(plan, plan.targets[i]); });
  for (const std::uint32_t i : order) {
    const PlannedTarget& target = plan.targets[i];
    Unit& unit = units_.emplace_back();
    unit.target = i;
    unit.parts = parts[i];
    auto problem =
        prepare_quantization(*target.quantization, target.shape, target.dtype, unit.form);
    if (problem) {
      throw Error("plan.quantize", std::move(problem->message),
                  {.tensor = target.name,
                   .found = std::move(problem->found),
                   .expected = std::move(problem->expected)});
    }
    unit.window = window_of(unit.form);
    unit.left = std::max<std::uint64_t>((unit.form.elements + unit.window - 1) / unit.window,
                                        1);  // an empty value has one too
    const std::uint64_t largest = std::min(unit.window, unit.form.elements);
    window_bytes_ = std::max(window_bytes_, largest * width(unit.form.dtype));
    bytes_total_ += unit.form.elements * width(unit.form.dtype);
  }
}

// Half of the thread's memory is for the numbers, half for what they are made of.
std::uint64_t Quantizer::window_of(const QuantizeForm& form) const noexcept {
  const std::uint64_t bytes = std::min(window_bytes_wanted, thread_bytes_ / 2);
  // Ranges that cut no block of a source are cheaper to read.
  const std::uint64_t step = form.by_rows
                                 ? form.window_elements
                                 : std::max(form.window_elements, ValueReader::whole_elements);
  return std::max<std::uint64_t>(bytes / width(form.dtype) / step, 1) * step;
}

std::optional<Quantizer::Window> Quantizer::take() {
  const std::lock_guard lock(mutex_);
  if (current_ >= units_.size()) return std::nullopt;
  Unit& unit = units_[current_];
  if (unit.next == 0 && unit.form.scratch_bytes > 0) {
    unit.scratch = AnonymousMemory(unit.form.scratch_bytes);
  }
  const Window window = {&unit, unit.next, std::min(unit.next + unit.window, unit.form.elements)};
  unit.next = window.end;
  if (unit.next == unit.form.elements) ++current_;
  return window;
}

void Quantizer::finish(const Window& window) {
  Unit& unit = *window.unit;
  bytes_done_ += (window.end - window.begin) * width(unit.form.dtype);
  if (--unit.left > 0) return;
  finish_quantized(unit.form, unit.parts, unit.scratch.data());
  unit.scratch = AnonymousMemory();
}

void Quantizer::run(Shards shards, std::atomic<bool>& stop) {
  if (units_.empty()) return;
  ValueReader reader(plan_.catalog, shards, thread_bytes_ / 2, stop);
  const AnonymousMemory numbers(window_bytes_ + 1);
  const Unit* open = nullptr;
  while (!stop.load(std::memory_order_relaxed)) {
    const auto window = take();
    if (!window) break;
    Unit& unit = *window->unit;
    const PlannedTarget& target = plan_.targets[unit.target];
    if (open != &unit) {
      reader.open({target.name, target.recipe.boxes, plan_.decodings, target.shape, target.dtype});
      open = &unit;
    }
    const std::uint64_t bytes = (window->end - window->begin) * width(unit.form.dtype);
    reader.read(window->begin, window->end, {numbers.data(), bytes});
    if (stop.load(std::memory_order_relaxed)) break;
    const std::uint64_t bad = quantize_window(unit.form, window->begin, window->end, numbers.data(),
                                              unit.parts, unit.scratch.data());
    if (bad < window->end) {
      std::uint64_t known = unit.not_finite;
      while (bad < known && !unit.not_finite.compare_exchange_weak(known, bad)) {
      }
    }
    finish(*window);
  }
  bytes_read_ += reader.bytes_read();
  staging_bytes_ += reader.staging_bytes_peak() + window_bytes_;
}

std::vector<Finding> Quantizer::findings() const {
  std::vector<Finding> findings;
  for (const Unit& unit : units_) {
    if (unit.not_finite == UINT64_MAX) continue;
    const PlannedTarget& target = plan_.targets[unit.target];
    findings.push_back({.severity = Severity::warning,
                        .code = "q.nan",
                        .target = target.name,
                        .message = fmt::format(
                            "'{}': element {} is NaN or infinite as {}, and with it what is "
                            "quantized beside it",
                            printable(target.name), unit.not_finite.load(),
                            target.quantization->encoding == "int8" ? "F16" : name(target.dtype))});
  }
  return findings;
}

}  // namespace loadstone
