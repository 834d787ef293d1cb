// Estimates how long a load or a conversion takes, from the rates that `loadstone bench` measured
// on this machine, for each file system. Plans do not contain the estimate.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "cli/bench_report.h"
#include "loadstone/convert.h"
#include "loadstone/plan.h"

namespace loadstone::cli {

// Fewest bytes whose rate is saved: a smaller sample measures mostly caches and start-up.
inline constexpr std::uint64_t kept_bytes_min = 256 << 20;

// Saves the rates for later estimates, in loadstone's folder of the user's cache, for the file
// systems of these paths. Keeps saved rates that were not measured again. Returns the reason if a
// rate is not saved, else an empty string.
[[nodiscard]] std::string save_rates(const BenchFigures& figures, const std::string& read_path,
                                     const std::string& write_folder);

struct Duration {
  std::optional<double> seconds;  // nullopt: unknown
  bool is_least = false;  // the work also computes, which `loadstone bench` does not measure
  std::string reason;     // the measurement, or the reason why the duration is unknown
};

[[nodiscard]] Duration duration_of(const Plan& plan);
[[nodiscard]] Duration duration_of(const Conversion& conversion, const std::string& target);

// Returns a line such as "duration  about 40 s (...)\n".
[[nodiscard]] std::string duration_line(const Duration& duration);
// Returns the JSON of a plan or conversion with the member "duration" added.
[[nodiscard]] std::string with_duration(const Duration& duration, const std::string& json);

}  // namespace loadstone::cli
