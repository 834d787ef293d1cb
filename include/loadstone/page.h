// A plan, and the load that followed it, as one HTML page: no network, no other file.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "loadstone/export.h"
#include "loadstone/plan.h"

namespace loadstone {

// How much had been read at a moment of a load.
struct ProgressSample {
  double seconds = 0;  // since the load began
  std::uint64_t bytes_done = 0;
};

struct Report;

// The time, bytes and memory of a load: figures_of() its Report, and what the caller measured.
struct LoadFigures {
  double seconds = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t staging_bytes_peak = 0;
  std::uint64_t process_bytes_peak = 0;  // measured: the largest resident set; 0: not known
  std::vector<ProgressSample> progress;  // may be empty
};

[[nodiscard]] LOADSTONE_API LoadFigures figures_of(const Report& report) noexcept;

struct PageOptions {
  std::string model;  // its name, for people; empty: left out
  // Shown as limits beside the plan's own figures: PlanOptions::max_memory.
  std::vector<std::pair<std::string, std::uint64_t>> max_memory;
  // Memory of a live model's old values, which is there until all new ones are: on top of the
  // peaks.
  std::map<std::string, std::uint64_t> held_bytes;
  std::optional<LoadFigures> loaded;  // of the load that carried the plan out
};

// Verdict first, then findings, memory, a map of the bytes and every target with its recipe. Names
// are escaped wherever they come from. About 300 bytes for each target.
[[nodiscard]] LOADSTONE_API std::string to_html(const Plan& plan, const PageOptions& options = {});

}  // namespace loadstone
