// Compares the devices of a plan with those of this machine.
#pragma once

#include <optional>

#include "loadstone/finding.h"
#include "loadstone/plan.h"

namespace loadstone {

// Returns warning "plan.device_absent" if the plan uses CUDA devices that this process does not
// see. loadstone cannot ask for devices of other types. A saved plan does not contain the warning.
[[nodiscard]] std::optional<Finding> absent_devices(const Plan& plan);

}  // namespace loadstone
