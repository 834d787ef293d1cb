// Folds the targets of a plan into table rows: targets whose names differ in one number share a
// row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "loadstone/plan.h"

namespace loadstone {

// Maximum findings shown per code and severity; further findings are only counted.
inline constexpr std::size_t findings_shown_max = 300;

// A row of the table, as text. It describes one or several targets.
struct PlanRow {
  std::string name;  // "layer.{0-11}.weight"
  std::uint64_t count = 0;
  std::string kind;
  std::string shape;
  std::string dtype;  // "F32", or "BF16 -> F32"
  std::string device;
  std::string origin;  // with details: "checkpoint, 128 boxes", "tie of 'x'"
  std::string from;    // the source if its name differs from the target's, or the number of sources
  std::uint64_t bytes = 0;
};

// Returns the runs of consecutive numbers, such as "0-3,5", at most `runs_max` of them.
[[nodiscard]] std::string ranges_text(const std::set<std::uint64_t>& numbers, std::size_t runs_max);

// Returns the row of a single target.
[[nodiscard]] PlanRow row_of(const Plan& plan, const PlannedTarget& target);

// Returns the rows in the order of their first targets.
[[nodiscard]] std::vector<PlanRow> fold_targets(const Plan& plan);

// Returns a string such as "103 targets: 101 checkpoint, 2 constructor".
[[nodiscard]] std::string counts_text(const Plan& plan);

}  // namespace loadstone
