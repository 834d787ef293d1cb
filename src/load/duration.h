// Estimates how long work takes, from the rates of storage/rates.h. Plans do not contain the
// estimate.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "loadstone/plan.h"

namespace loadstone {

struct Duration {
  std::optional<double> seconds;  // nullopt: unknown
  std::string excluded = {};      // the part of the work that was not measured; empty: nothing
  std::string reason;             // the measurement, or the reason why the duration is unknown

  // Returns a text such as "about 40 s (measured ...)" or "unknown: ...".
  [[nodiscard]] std::string text() const;
};

// Work on the tensors of a plan.
struct Work {
  std::uint64_t bytes_to_read = 0;
  std::uint64_t bytes_to_write = 0;
  std::string write_path{};  // need not exist
  double encoded_share = 1;  // of the plan's values; the others were encoded before
};

// Returns the duration of the work. It is unknown if the file of rates is missing, damaged, of
// another machine, or lacks a file system.
[[nodiscard]] Duration duration_of(const Plan& plan, const Work& work,
                                   const std::string& rates_file);

}  // namespace loadstone
