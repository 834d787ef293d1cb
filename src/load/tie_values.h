// Compares tied tensors that a checkpoint stores twice.
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

// Reads both tensors and compares the values that a load would give them (codes are decoded).
// Returns a warning "plan.tie" with the largest difference, or nullopt if the values are equal.
// `memory_bytes` is the approximate memory limit for reading remote tensors.
[[nodiscard]] std::optional<Finding> compare_tie(
    const std::shared_ptr<const Catalog>& catalog, const TieCheck& check, Storage& storage,
    std::atomic<bool>& stop, std::uint64_t& bytes_read,
    std::uint64_t memory_bytes = defaults::staging_bytes_max);

// Compares all ties of a plan. A difference is added to `findings`, or throws Error "plan.tie" if
// the check's is_error is set. Returns the bytes read.
std::uint64_t compare_ties(const Plan& plan, Storage& storage, std::vector<Finding>& findings,
                           Observer* observer);

}  // namespace loadstone
