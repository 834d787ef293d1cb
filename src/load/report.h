// Records the results of a load.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "loadstone/execute.h"

namespace loadstone {

// Returns one entry per target, in the plan's order. `bytes_written(i)` returns the bytes that the
// load wrote to target i.
[[nodiscard]] std::vector<Provenance> make_provenance(
    const Plan& plan, const std::function<std::uint64_t(std::size_t)>& bytes_written);

}  // namespace loadstone
