#include "loadstone/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/named.h"
#include "base/only_errors.h"
#include "codec/encode.h"
#include "kernels/quantize.h"
#include "loadstone/error.h"
#include "plan/catalog_of.h"
#include "plan/origins.h"

namespace loadstone {

std::string_view name(Delivery delivery) noexcept {
  return name_among({"none", "memory", "file_view", "disk_write", "disk_keep"}, delivery);
}

std::string_view name(Origin origin) noexcept { return origin_row(origin).name; }

std::string_view name(MissingPolicy policy) noexcept { return missing_row(policy).name; }

std::string_view name(TiePolicy policy) noexcept { return name_among({"split", "keep"}, policy); }

std::string_view name(UnexpectedPolicy policy) noexcept {
  return name_among({"warn", "error", "ignore"}, policy);
}

std::string_view name(DeviceMapMode mode) noexcept {
  return name_among({"auto", "balanced", "balanced_low_0", "sequential"}, mode);
}

std::uint64_t PlannedTarget::byte_count() const {
  return only_errors([&]() -> std::uint64_t {
    QuantizedLayout form;
    if (quantization && !prepare_quantization(*quantization, shape, dtype, form)) {
      std::uint64_t bytes = 0;
      for (const QuantizedPart& part : form.parts) bytes += part.byte_count();
      return bytes;
    }
    return Encoding(dtype).byte_count(shape.numel().value_or(0)).value_or(0);
  });
}

const Catalog& catalog_of(const Plan& plan) {
  if (plan.catalog != nullptr) return *plan.catalog;
  throw Error("usage",
              "the plan has no catalog: make it with make_plan(), make_conversion() or "
              "plan_from_json()");
}

void require_ok(const Plan& plan) {
  only_errors([&] {
    static_cast<void>(catalog_of(plan));
    require_no_errors(plan.findings);
  });
}

}  // namespace loadstone
