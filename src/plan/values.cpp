#include "plan/values.h"

#include "plan/costs.h"
#include "plan/devices.h"
#include "plan/origins.h"

namespace loadstone {

namespace {

Making making_of(const PlannedTarget& target, const Value& value) noexcept {
  const bool is_given =
      target.delivery == Delivery::memory || target.delivery == Delivery::disk_write;
  if (!is_given || !is_delivered(target.recipe.origin)) return Making::none;
  const bool is_read = !value.boxes.empty() && value.merge == nullptr;
  return is_read && value.quantization == nullptr && value.has_place ? Making::in_order
                                                                     : Making::windows;
}

}  // namespace

Value value_of(const PlannedTarget& target, SinkKind sink) noexcept {
  const Recipe& recipe = target.recipe;
  const bool is_on_device = target.delivery == Delivery::memory && is_accelerator(target.device);
  Value value = {.name = target.name,
                 .shape = &target.shape,
                 .dtype = target.dtype,
                 .boxes = recipe.boxes,
                 .merge = recipe.merge.get(),
                 .constant = recipe.constant.get(),
                 .fill = origin_row(recipe.origin).fill,
                 .quantization = target.quantization ? &*target.quantization : nullptr,
                 .decided_by = recipe.decided_by,
                 .device = is_on_device ? std::string_view(target.device) : std::string_view(),
                 .has_place = sink == SinkKind::memory && !is_on_device};
  value.making = making_of(target, value);
  return value;
}

ValueSet values_of(const Plan& plan, SinkKind sink) {
  ValueSet values = {.catalog = *plan.catalog,
                     .decodings = plan.decodings,
                     .allows_non_finite = plan.allow_non_finite};
  values.list.reserve(plan.targets.size());
  for (const PlannedTarget& target : plan.targets) {
    values.list.push_back(value_of(target, sink));
  }
  return values;
}

// The processes on one machine share one limit of pinned memory, so each gets an equal part.
Limits limits_of(const Plan& plan, const ValueSet& values) {
  const std::uint64_t pinned =
      plan.local_ranks > 1 ? plan.staging_bytes_max / plan.local_ranks : UINT64_MAX;
  return Limits(values, pinned);
}

LimitOptions promise_of(const Plan& plan) noexcept {
  return {.threads = plan.threads, .bytes_max = plan.staging_bytes_max};
}

}  // namespace loadstone
