#include "loadstone/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/only_errors.h"
#include "codec/encode.h"
#include "kernels/quantize.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::array<std::string_view, 5> delivery_names = {"none", "memory", "file_view",
                                                            "disk_write", "disk_keep"};
constexpr std::array<std::string_view, 7> origin_names = {
    "checkpoint", "constructor", "initialiser", "zeros", "constant", "tie", "exception"};

}  // namespace

std::string_view name(Delivery delivery) noexcept {
  return delivery_names[static_cast<std::size_t>(delivery) % delivery_names.size()];
}

std::string_view name(Origin origin) noexcept {
  return origin_names[static_cast<std::size_t>(origin) % origin_names.size()];
}

bool origin_from_name(std::string_view name, Origin& origin) noexcept {
  const auto* found = std::ranges::find(origin_names, name);
  if (found == origin_names.end()) return false;
  origin = static_cast<Origin>(found - origin_names.begin());
  return true;
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
