// Estimates how long work takes, from the rates that `loadstone bench` measured on this machine and
// saved in a file. Plans do not contain the estimate.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "loadstone/plan.h"

namespace loadstone {

// The rates of a machine in bytes per second.
struct Rates {
  std::string host;
  std::string processor;
  std::string date;      // "2026-11-30"
  bool is_disk = false;  // true: `read` is the rate of a load from the disk, else the page cache
  std::uint64_t read = 0;
  std::uint64_t write = 0;  // 0: not measured
};

// Returns rates without measurements, for this machine and today.
[[nodiscard]] Rates rates_of_this_machine();
// Writes the rates to `file`, whose folder must exist. Throws Error "io.*".
void save_rates(const Rates& rates, const std::string& file);

struct Duration {
  std::optional<double> seconds;  // nullopt: unknown
  bool is_least = false;  // the work also computes, which `loadstone bench` does not measure
  std::string reason;     // the measurement, or the reason why the duration is unknown

  // Returns a text such as "about 40 s (measured ...)" or "unknown: ...".
  [[nodiscard]] std::string text() const;
};

// Returns the duration of work that reads and writes these numbers of bytes for the plan. The
// duration is unknown if the file of rates is missing, damaged or of another machine.
[[nodiscard]] Duration duration_of(const Plan& plan, std::uint64_t bytes_to_read,
                                   std::uint64_t bytes_to_write, const std::string& rates_file);

}  // namespace loadstone
