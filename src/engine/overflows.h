// Counts and reports finite values that overflow the dtype to which they are cast.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "boxes/value.h"
#include "kernels/cast.h"
#include "loadstone/finding.h"

namespace loadstone {

// Number of overflows of each planned value, by its index. Thread-safe.
class Overflows {
 public:
  void add(std::uint32_t value, const Overflow& found);
  [[nodiscard]] Overflow of(std::uint32_t value) const;
  // Returns the sum over all values, and resets the counts.
  [[nodiscard]] Overflow take();
  // Returns a warning for each value with overflows, in the order of the values.
  [[nodiscard]] std::vector<Finding> findings(const ValueSet& values) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::uint32_t, Overflow> found_;
};

// Returns a message such as "3 of 4096 numbers are too large for F16, the largest is 70000".
[[nodiscard]] std::string overflow_text(const Value& value, const Overflow& found);

// Throws Error "convert.overflow" if values overflowed.
void require_none(const Value& value, const Overflow& found);

}  // namespace loadstone
