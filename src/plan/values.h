// Converts a plan to the values that the engine writes.
#pragma once

#include "boxes/value.h"
#include "engine/limits.h"
#include "loadstone/plan.h"

namespace loadstone {

// The destination of a plan's values.
enum class SinkKind : std::uint8_t { memory, files };

// Returns one value for each target, in the order of the targets. The values refer to the plan,
// which must outlive them.
[[nodiscard]] ValueSet values_of(const Plan& plan, SinkKind sink = SinkKind::memory);
[[nodiscard]] Value value_of(const PlannedTarget& target,
                             SinkKind sink = SinkKind::memory) noexcept;
ValueSet values_of(const Plan&& plan, SinkKind sink = SinkKind::memory) = delete;
Value value_of(const PlannedTarget&& target, SinkKind sink = SinkKind::memory) = delete;

// Returns the limits of a load. `values` are the plan's, and must outlive the limits.
[[nodiscard]] Limits limits_of(const Plan& plan, const ValueSet& values);
[[nodiscard]] LimitOptions promise_of(const Plan& plan) noexcept;

}  // namespace loadstone
