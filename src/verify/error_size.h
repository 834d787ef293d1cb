// Measures the size of differences between the values of two checkpoints.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "catalog/open_shards.h"
#include "engine/jobs.h"
#include "loadstone/verify.h"
#include "verify/pairs.h"

namespace loadstone {

// Sums the differences of pairs of values. Equal values, and two NaN, have the difference 0. If
// only one value is finite, the difference is infinite.
struct ErrorSum {
  double largest = 0;
  double difference = 0;  // sum of squares of the differences
  double power = 0;       // sum of squares of the first checkpoint's values

  void add(double first, double second) noexcept {
    if (std::isfinite(first)) power += first * first;
    if (first == second || (std::isnan(first) && std::isnan(second))) return;
    const bool has_size = std::isfinite(first) && std::isfinite(second);
    const double step =
        has_size ? std::abs(first - second) : std::numeric_limits<double>::infinity();
    difference += step * step;
    largest = std::max(largest, step);
  }
  [[nodiscard]] ErrorSize size() const noexcept {
    return {largest, difference == 0 ? 0 : std::sqrt(difference / power)};
  }
};

// Returns the difference between all values of a tensor, decoded if they are quantized.
[[nodiscard]] ErrorSize size_of_difference(const std::string& name, const TensorRecipe& first_value,
                                           const TensorRecipe& second_value,
                                           const OpenShards& first, const OpenShards& second,
                                           Jobs& jobs, std::vector<std::byte>& scratch);

// Measures the differences of bytes or values that `report` lists, and sets `error` of each of
// them. Reads the values of these tensors again, decoded if they are quantized.
void measure_differences(const Pairs& pairs, const OpenShards& first, const OpenShards& second,
                         Jobs& jobs, VerifyReport& report);

}  // namespace loadstone
