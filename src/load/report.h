// Writing down what a load did.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "loadstone/execute.h"

namespace loadstone {

// One entry a target, in the plan's order. `bytes_written(i)`: counted for target i.
[[nodiscard]] std::vector<Provenance> make_provenance(
    const Plan& plan, const std::function<std::uint64_t(std::size_t)>& bytes_written);

}  // namespace loadstone
