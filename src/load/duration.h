// Estimates how long work takes, from the rates that `loadstone bench` measured on this machine for
// each file system, and saved in a file. Plans do not contain the estimate.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "loadstone/plan.h"

namespace loadstone {

// The rate of reads from one file system, or of writes to it.
struct Rate {
  std::string mount;  // where the file system is mounted
  bool is_write = false;
  bool is_disk = false;  // true: read from the disk, else from the page cache
  std::string date;      // "2026-11-30"
  std::uint64_t bytes_per_second = 0;
};

// Returns a rate of the file system of `path`, measured today. The path need not exist.
[[nodiscard]] Rate rate_of_today(const std::string& path, bool is_write, bool is_disk,
                                 std::uint64_t bytes_per_second);
// Writes the rates to `file`, whose folder must exist. Keeps the file's rates of this machine that
// were not measured again. Throws Error "io.*".
void save_rates(const std::vector<Rate>& rates, const std::string& file);

struct Duration {
  std::optional<double> seconds;  // nullopt: unknown
  bool is_least = false;  // the work also computes, which `loadstone bench` does not measure
  std::string reason;     // the measurement, or the reason why the duration is unknown

  // Returns a text such as "about 40 s (measured ...)" or "unknown: ...".
  [[nodiscard]] std::string text() const;
};

// Work on the tensors of a plan.
struct Work {
  std::uint64_t bytes_to_read = 0;
  std::uint64_t bytes_to_write = 0;
  std::string write_path{};  // need not exist
};

// Returns the duration of the work. It is unknown if the file of rates is missing, damaged, of
// another machine, or lacks a file system.
[[nodiscard]] Duration duration_of(const Plan& plan, const Work& work,
                                   const std::string& rates_file);

}  // namespace loadstone
