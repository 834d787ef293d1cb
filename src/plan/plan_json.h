// Reads and writes a plan as JSON (docs/plan-json.md). A saved plan is first parsed, and then bound
// to a catalog.
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

// The path and the files of a checkpoint when the plan was saved.
struct SavedCheckpoint {
  std::string root;
  std::string config_digest;  // digest of the quantization config; empty: unknown
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
  std::string taken;  // `taken` and `other` are tensor names in the first checkpoint
  std::string other;
};

// A parsed plan that has not been checked against a catalog. Boxes refer to positions in `sources`,
// and plan.catalog is null.
struct SavedPlan {
  std::vector<SavedCheckpoint> checkpoints;  // at least one; adapters follow the base
  std::vector<SavedSource> sources;
  std::vector<SavedTieCheck> tie_checks;
  Plan plan;
};

// Throws Error "plan.json" that names the invalid field.
[[nodiscard]] SavedPlan read_plan(std::string_view text);

// Checks all fields against the catalog, and returns the plan bound to it. Adds a finding if shards
// have a different modification time. Throws Error "io.changed", "plan.json" or "plan.box".
[[nodiscard]] Plan bind_plan(SavedPlan saved, std::shared_ptr<const Catalog> catalog);

}  // namespace loadstone
