// Computes the costs of a plan and the delivery of each target. make_plan() uses the results, and
// plan_from_json() compares them with the saved ones.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "loadstone/plan.h"
#include "plan/origins.h"

namespace loadstone {

// Returns true if the target equals one whole source, byte for byte.
[[nodiscard]] bool is_whole_source(const Plan& plan, const PlannedTarget& target) noexcept;

// Returns true if the offload folder can refer to the shard instead of storing a copy. The target
// must be a whole source of the same shape in a safetensors shard. The dtypes must be equal, or be
// floats between which the folder's reader casts.
[[nodiscard]] bool can_keep_on_disk(const Plan& plan, const PlannedTarget& target) noexcept;

// Returns true if a tensor's elements are aligned in the file, and therefore in a mapping of the
// file. Always true for a tensor without elements; never true for a block format.
[[nodiscard]] bool can_view(const TensorInfo& tensor) noexcept;

// Returns true if the shard is one local file, so that memory can be a view of it.
[[nodiscard]] bool is_mappable(const Catalog& catalog, std::uint32_t shard) noexcept;

// Returns true if a shard that contains a source of the target is remote.
[[nodiscard]] bool comes_over_network(const Plan& plan, const PlannedTarget& target) noexcept;

// Returns true if the target can be a view of the file: its source is whole, not empty and aligned.
[[nodiscard]] bool can_view_file(const Plan& plan, const PlannedTarget& target) noexcept;

// Returns the bytes that a target occupies on its device (in the offload folder for "disk").
// Returns 0 for a view of the file, a tie and a target without a value.
[[nodiscard]] std::uint64_t bytes_placed(const PlannedTarget& target);

// Sets bytes_to_read, bytes_to_write and peak_bytes from the targets and the plan's threads.
void count_costs(Plan& plan);

}  // namespace loadstone
