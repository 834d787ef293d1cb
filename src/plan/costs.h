// What a plan costs, and how each target reaches its place. Shared by make_plan(), which decides,
// and plan_from_json(), which checks.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "loadstone/plan.h"
#include "plan/origins.h"

namespace loadstone {

// Whether the target is one whole source, byte for byte: the same elements in the same order in the
// same dtype.
[[nodiscard]] bool is_whole_source(const Plan& plan, const PlannedTarget& target) noexcept;

// Whether the offload folder can point at the shard instead of holding a copy: a whole source of
// the same shape in a safetensors shard, in the target's dtype or, between floats, another one that
// the folder's reader casts.
[[nodiscard]] bool can_keep_on_disk(const Plan& plan, const PlannedTarget& target) noexcept;

// Whether a tensor's elements stand where the processor wants them: offsets of a file mapping are
// those of the file. A tensor without elements always does; one of a block format never.
[[nodiscard]] bool can_view(const TensorInfo& tensor) noexcept;

// Whether the shard is one file of this machine, so that memory can be a view of it.
[[nodiscard]] bool is_mappable(const Catalog& catalog, std::uint32_t shard) noexcept;

// Whether one of the shards that the target's value comes from is on another machine.
[[nodiscard]] bool comes_over_network(const Plan& plan, const PlannedTarget& target) noexcept;

// Whether a view of the file can be the value: a whole source that has bytes and can be viewed.
[[nodiscard]] bool can_view_file(const Plan& plan, const PlannedTarget& target) noexcept;

// The bytes that a target takes on its device ("disk": in the offload folder): none for views of
// the file, ties and targets without a value.
[[nodiscard]] std::uint64_t bytes_placed(const PlannedTarget& target);

// Fills in bytes_to_read, bytes_to_write and peak_bytes from the targets, for as many threads as
// the plan says.
void count_costs(Plan& plan);

}  // namespace loadstone
