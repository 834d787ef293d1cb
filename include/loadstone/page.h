// Writes a plan, and the load that executed it, as one self-contained HTML page.
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

// Number of bytes that had been read at one moment of a load.
struct ProgressSample {
  double seconds = 0;  // since the start of the load
  std::uint64_t bytes_done = 0;
};

struct Report;

// Time, bytes and memory of a load. figures_of() fills in the values of a Report; the caller adds
// its own measurements.
struct LoadFigures {
  double seconds = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t staging_bytes_peak = 0;
  std::uint64_t process_bytes_peak = 0;    // largest resident set, as measured; 0: unknown
  std::vector<ProgressSample> progress{};  // may be empty
};

[[nodiscard]] LOADSTONE_API LoadFigures figures_of(const Report& report) noexcept;

struct PageOptions {
  std::string model{};  // name to show; may be empty
  // Memory limits per device to show next to the plan's figures, see PlanOptions::max_memory.
  std::vector<std::pair<std::string, std::uint64_t>> max_memory{};
  // Bytes per device of a live model's old values, which exist until the load has all new values.
  // They are added to the peaks.
  std::map<std::string, std::uint64_t> held_bytes{};
  std::optional<LoadFigures> loaded{};  // figures of the load that executed the plan
};

// Returns the page: verdict, findings, memory, a map of the bytes, and every target with its
// recipe. Names are escaped. The page takes about 300 bytes per target.
[[nodiscard]] LOADSTONE_API std::string to_html(const Plan& plan, const PageOptions& options = {});

}  // namespace loadstone
