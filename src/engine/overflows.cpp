#include "engine/overflows.h"

#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <utility>

#include "base/text.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr const char* code = "convert.overflow";

// Returns the dtypes that can represent the value, such as "bf16 or f32".
std::string wider(double largest) {
  std::string names;
  std::size_t count = 0;
  for (const auto& [dtype, word] : {std::pair(Dtype::f16, "f16"), std::pair(Dtype::bf16, "bf16"),
                                    std::pair(Dtype::f32, "f32"), std::pair(Dtype::f64, "f64")}) {
    const FloatFormat& format = dtype_info(dtype).format;
    const double most = std::ldexp(2 - std::ldexp(1, 1 - format.digits), format.largest);
    if (largest > most || count == 2) continue;
    names += count++ == 0 ? word : fmt::format(" or {}", word);
  }
  return names;
}

}  // namespace

void Overflows::add(std::uint32_t value, const Overflow& found) {
  if (found.count + found.spoiled == 0) return;
  const std::lock_guard lock(mutex_);
  found_[value] += found;
}

Overflow Overflows::of(std::uint32_t value) const {
  const std::lock_guard lock(mutex_);
  const auto known = found_.find(value);
  return known == found_.end() ? Overflow() : known->second;
}

Overflow Overflows::take() {
  const std::lock_guard lock(mutex_);
  Overflow all;
  for (const auto& [value, found] : std::exchange(found_, {})) all += found;
  return all;
}

std::vector<Finding> Overflows::findings(const ValueSet& values) const {
  const std::lock_guard lock(mutex_);
  std::vector<Finding> findings;
  for (const auto& [number, found] : found_) {
    const Value& value = values[number];
    Finding& finding = findings.emplace_back(Finding{
        .severity = Severity::warning,
        .code = code,
        .target = std::string(value.name),
        .message = fmt::format("'{}': {}", printable(value.name), overflow_text(value, found))});
    if (found.count == 0) continue;
    finding.found = fmt::format("{}", found.largest);
    finding.expected = name(value.dtype);
    if (found.spoiled > 0) continue;  // a wider dtype does not help
    finding.suggestion = fmt::format("A wider dtype can represent them: {}", wider(found.largest));
  }
  return findings;
}

std::string overflow_text(const Value& value, const Overflow& found) {
  const std::uint64_t all = value.elements();
  std::string text;
  if (found.count > 0) {
    text = fmt::format("{} of {} values {} too large for {}; the largest is {}", found.count, all,
                       found.count == 1 ? "is" : "are", name(value.dtype), found.largest);
  }
  if (found.spoiled > 0) {
    text += fmt::format("{}{} of {} values {} NaN or infinite because of a scale",
                        text.empty() ? "" : "; ", found.spoiled, all,
                        found.spoiled == 1 ? "is" : "are");
  }
  return text;
}

void require_none(const Value& value, const Overflow& found) {
  if (found.count + found.spoiled == 0) return;
  const std::string wide =
      found.spoiled > 0
          ? ""
          : fmt::format("a wider dtype can represent them ({}), and ", wider(found.largest));
  throw Error(code,
              fmt::format("{}; {}--allow-non-finite writes them as infinity or NaN",
                          overflow_text(value, found), wide),
              {.tensor = std::string(value.name)});
}

}  // namespace loadstone
