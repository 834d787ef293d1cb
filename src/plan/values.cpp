#include "plan/values.h"

#include "plan/costs.h"
#include "plan/devices.h"

namespace loadstone {

Value value_of(const PlannedTarget& target) noexcept {
  const Recipe& recipe = target.recipe;
  const bool is_in_memory = target.delivery == Delivery::memory;
  return {.name = target.name,
          .shape = &target.shape,
          .dtype = target.dtype,
          .boxes = recipe.boxes,
          .merge = recipe.merge.get(),
          .constant = recipe.constant.get(),
          .quantization = target.quantization ? &*target.quantization : nullptr,
          .device = is_in_memory && is_accelerator(target.device) ? std::string_view(target.device)
                                                                  : std::string_view(),
          .is_made = (is_in_memory || target.delivery == Delivery::disk_write) &&
                     is_delivered(recipe.origin)};
}

ValueSet values_of(const Plan& plan) {
  ValueSet values = {.catalog = *plan.catalog,
                     .decodings = plan.decodings,
                     .allows_non_finite = plan.allow_non_finite};
  values.list.reserve(plan.targets.size());
  for (const PlannedTarget& target : plan.targets) values.list.push_back(value_of(target));
  return values;
}

// Ranks of a machine share the pinned memory that one of them may have.
Limits limits_of(const Plan& plan, const ValueSet& values) {
  const std::uint64_t pinned =
      plan.local_ranks > 1 ? plan.staging_bytes_max / plan.local_ranks : UINT64_MAX;
  return {values, SinkKind::memory, pinned};
}

LimitOptions promise_of(const Plan& plan) noexcept {
  return {.threads = plan.threads, .bytes_max = plan.staging_bytes_max};
}

}  // namespace loadstone
