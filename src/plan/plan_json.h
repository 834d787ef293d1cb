// A plan as JSON: docs/plan-json.md. A file is read first, and bound to a catalog afterwards.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json_fields.h"
#include "loadstone/plan.h"

namespace loadstone {

inline constexpr std::uint64_t plan_json_version = 1;

struct SavedShard {
  std::string path;  // relative to the root
  FileIdentity identity;
  std::string header_digest;
};

// A checkpoint's former place and files.
struct SavedCheckpoint {
  std::string root;
  std::string config_digest;  // of its claim; empty: unknown
  std::vector<SavedShard> shards;
};

struct SavedSource {
  std::string name;
  std::uint32_t checkpoint = 0;  // position in SavedPlan::checkpoints
  Encoding encoding = Dtype::u8;
  Shape shape;
};

struct SavedTieCheck {
  TieCheck check;
  std::string taken;  // names of its sources, tensors of the first checkpoint
  std::string other;
};

// A plan as stored: nothing is checked against a catalog. Boxes refer to positions in `sources`;
// plan.catalog is null.
struct SavedPlan {
  std::vector<SavedCheckpoint> checkpoints;  // at least one; adapters follow it
  std::vector<SavedSource> sources;
  std::vector<SavedTieCheck> tie_checks;
  Plan plan;
};

// Throws Error "plan.json" that names the field.
[[nodiscard]] SavedPlan read_plan(std::string_view text);

// Checks everything against the catalog and returns the plan with it, and with a finding if shards
// have a different modification time. Throws Error "io.changed", "plan.json" or "plan.box".
[[nodiscard]] Plan bind_plan(SavedPlan saved, std::shared_ptr<const Catalog> catalog);

}  // namespace loadstone
