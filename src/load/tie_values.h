// Values of tied names that a checkpoint holds twice.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "loadstone/defaults.h"
#include "loadstone/finding.h"
#include "loadstone/observer.h"
#include "loadstone/plan.h"
#include "loadstone/storage.h"

namespace loadstone {

// Reads the two tensors of a tie and compares them as they are loaded, codes as the values that
// they stand for. Returns a warning "plan.tie" with the largest difference, or nothing if they are
// equal. `memory_bytes`: what a reader of remote tensors may take, about.
[[nodiscard]] std::optional<Finding> compare_tie(
    const std::shared_ptr<const Catalog>& catalog, const TieCheck& check, Storage& storage,
    std::atomic<bool>& stop, std::uint64_t& bytes_read,
    std::uint64_t memory_bytes = defaults::staging_bytes_max);

// Compares all ties of a plan. A difference is added to `findings`, or is Error "plan.tie" if the
// check asks for that. Returns the bytes read.
std::uint64_t compare_ties(const Plan& plan, Storage& storage, std::vector<Finding>& findings,
                           Observer* observer);

}  // namespace loadstone
