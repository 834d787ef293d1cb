// Many targets as few rows: those that differ by one number in their names only are one row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "loadstone/plan.h"

namespace loadstone {

// Findings per code and severity; further ones are counted.
inline constexpr std::size_t findings_shown_max = 300;

// The row of one or several targets, as text.
struct PlanRow {
  std::string name;  // "layer.{0-11}.weight"
  std::uint64_t count = 0;
  std::string kind;
  std::string shape;
  std::string dtype;  // "F32", or "BF16 -> F32"
  std::string device;
  std::string origin;  // with its arguments: "checkpoint, 128 boxes", "tie of 'x'"
  std::string from;    // the source if its name differs, or the number of sources
  std::uint64_t bytes = 0;
};

// The row of one target, with its name.
[[nodiscard]] PlanRow row_of(const Plan& plan, const PlannedTarget& target);

// Rows in the order of their first targets.
[[nodiscard]] std::vector<PlanRow> fold_targets(const Plan& plan);

// "103 targets: 101 checkpoint, 2 constructor"
[[nodiscard]] std::string counts_text(const Plan& plan);

}  // namespace loadstone
