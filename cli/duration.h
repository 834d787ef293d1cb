// Keeps the rates that `loadstone bench` measures in the user's cache, and estimates durations from
// them.
#pragma once

#include <string>

#include "cli/bench_report.h"
#include "load/duration.h"
#include "loadstone/convert.h"
#include "loadstone/plan.h"

namespace loadstone::cli {

// Saves the rates for later estimates, in loadstone's folder of the user's cache. Returns false if
// they cannot be saved.
bool save_rates(const BenchFigures& figures);

[[nodiscard]] Duration duration_of(const Plan& plan);
[[nodiscard]] Duration duration_of(const Conversion& conversion);

// Returns a line such as "duration  about 40 s (...)\n".
[[nodiscard]] std::string duration_line(const Duration& duration);
// Returns the JSON of a plan or conversion with the member "duration" added.
[[nodiscard]] std::string with_duration(const Duration& duration, const std::string& json);

}  // namespace loadstone::cli
