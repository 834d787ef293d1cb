// The costs of a plan, and the delivery of each target. Shared by make_plan(), which decides, and
// plan_from_json(), which checks.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "loadstone/plan.h"
#include "plan/origins.h"

namespace loadstone {

// Returns true if the target equals one whole source, byte for byte.
[[nodiscard]] bool is_whole_source(const Plan& plan, const PlannedTarget& target) noexcept;

// Returns true if the offload folder can refer to the shard instead of a copy: a whole source of
// the same shape in a safetensors shard, with the target's dtype or, between floats, one that the
// folder's reader casts.
[[nodiscard]] bool can_keep_on_disk(const Plan& plan, const PlannedTarget& target) noexcept;

// Returns true if a tensor's elements are aligned in the file, and so in a mapping of it. Always
// true for a tensor without elements; never for a block format.
[[nodiscard]] bool can_view(const TensorInfo& tensor) noexcept;

// Returns true if the shard is one local file, so that memory can be a view of it.
[[nodiscard]] bool is_mappable(const Catalog& catalog, std::uint32_t shard) noexcept;

// Returns true if one of the shards with the target's sources is remote.
[[nodiscard]] bool comes_over_network(const Plan& plan, const PlannedTarget& target) noexcept;

// Returns true if a view of the file can be the value: a whole source that has bytes and is
// aligned.
[[nodiscard]] bool can_view_file(const Plan& plan, const PlannedTarget& target) noexcept;

// Returns the bytes of a target on its device ("disk": in the offload folder): 0 for views of the
// file, ties and targets without a value.
[[nodiscard]] std::uint64_t bytes_placed(const PlannedTarget& target);

// Sets bytes_to_read, bytes_to_write and peak_bytes from the targets and the plan's threads.
void count_costs(Plan& plan);

}  // namespace loadstone
