// Keeps the rates that `loadstone bench` measures in the user's cache, and estimates durations from
// them.
#pragma once

#include <cstdint>
#include <string>

#include "cli/bench_report.h"
#include "load/duration.h"
#include "loadstone/convert.h"
#include "loadstone/plan.h"

namespace loadstone::cli {

// Fewest bytes whose rate is saved: a smaller sample measures mostly caches and start-up.
inline constexpr std::uint64_t kept_bytes_min = 256 << 20;

// Saves the rates for later estimates, in loadstone's folder of the user's cache, for the file
// systems of these paths. Returns the reason if a rate is not saved, else an empty string.
[[nodiscard]] std::string save_rates(const BenchFigures& figures, const std::string& read_path,
                                     const std::string& write_folder);

[[nodiscard]] Duration duration_of(const Plan& plan);
[[nodiscard]] Duration duration_of(const Conversion& conversion, const WorkLeft& left,
                                   const std::string& target);

// Returns a line such as "duration  about 40 s (...)\n".
[[nodiscard]] std::string duration_line(const Duration& duration);
// Returns the JSON of a plan or conversion with the member "duration" added.
[[nodiscard]] std::string with_duration(const Duration& duration, const std::string& json);

}  // namespace loadstone::cli
