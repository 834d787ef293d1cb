// Finite values that overflow their new dtype: one rule, and one message.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "boxes/value.h"
#include "kernels/cast.h"
#include "loadstone/finding.h"

namespace loadstone {

// Counts by value. Thread-safe.
class Overflows {
 public:
  void add(std::uint32_t value, const Overflow& found);
  [[nodiscard]] Overflow of(std::uint32_t value) const;
  // Returns the sum of all values, and forgets it.
  [[nodiscard]] Overflow take();
  // A warning for each value, in their order.
  [[nodiscard]] std::vector<Finding> findings(const ValueSet& values) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::uint32_t, Overflow> found_;
};

// "3 of 4096 numbers are too large for F16, the largest is 70000"
[[nodiscard]] std::string overflow_text(const Value& value, const Overflow& found);

// Throws Error "convert.overflow" if there are any.
void require_none(const Value& value, const Overflow& found);

}  // namespace loadstone
