#include "loadstone/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/only_errors.h"
#include "codec/encode.h"
#include "kernels/quantize.h"
#include "loadstone/error.h"
#include "plan/origins.h"

namespace loadstone {

std::string_view name(Delivery delivery) noexcept {
  switch (delivery) {
    case Delivery::none:
      return "none";
    case Delivery::memory:
      return "memory";
    case Delivery::file_view:
      return "file_view";
    case Delivery::disk_write:
      return "disk_write";
    case Delivery::disk_keep:
      return "disk_keep";
  }
  return {};
}

std::string_view name(Origin origin) noexcept { return origin_row(origin).name; }

std::string_view name(MissingPolicy policy) noexcept { return missing_row(policy).name; }

std::string_view name(TiePolicy policy) noexcept {
  switch (policy) {
    case TiePolicy::split:
      return "split";
    case TiePolicy::keep:
      return "keep";
  }
  return {};
}

std::string_view name(UnexpectedPolicy policy) noexcept {
  switch (policy) {
    case UnexpectedPolicy::warn:
      return "warn";
    case UnexpectedPolicy::error:
      return "error";
    case UnexpectedPolicy::ignore:
      return "ignore";
  }
  return {};
}

std::string_view name(DeviceMapMode mode) noexcept {
  switch (mode) {
    case DeviceMapMode::automatic:
      return "auto";
    case DeviceMapMode::balanced:
      return "balanced";
    case DeviceMapMode::balanced_low_0:
      return "balanced_low_0";
    case DeviceMapMode::sequential:
      return "sequential";
  }
  return {};
}

std::uint64_t PlannedTarget::byte_count() const {
  return only_errors([&]() -> std::uint64_t {
    QuantizeForm form;
    if (quantization && !prepare_quantization(*quantization, shape, dtype, form)) {
      std::uint64_t bytes = 0;
      for (const QuantizedPart& part : form.parts) bytes += part.byte_count();
      return bytes;
    }
    return Encoding(dtype).byte_count(shape.numel().value_or(0)).value_or(0);
  });
}

void require_ok(const Plan& plan) {
  only_errors([&] {
    const auto is_error = [](const Finding& f) { return f.severity == Severity::error; };
    const auto first = std::ranges::find_if(plan.findings, is_error);
    if (first == plan.findings.end()) return;
    const auto more = std::ranges::count_if(plan.findings, is_error) - 1;
    std::string message = first->message;
    if (more > 0) message += fmt::format(" (and {} more errors)", more);
    throw Error(first->code, message,
                {.tensor = first->target, .found = first->found, .expected = first->expected});
  });
}

}  // namespace loadstone
