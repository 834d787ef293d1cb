// Groups of values that are encoded together. See groups_inl.h.
#pragma once

#include <cmath>
#include <cstddef>

namespace loadstone::simd {

// The values of a group. `importance` may be null.
struct GroupNumbers {
  const float* numbers;
  const float* importance;
  float row_mean_square;
};

inline float sum_of_squares(const float* numbers, std::size_t count) noexcept {
  float sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += numbers[i] * numbers[i];
  return sum;
}

// Returns the first value with the largest magnitude, or 0 if all values are NaN.
inline float extreme_of(const float* values, std::size_t count) noexcept {
  float most = 0;
  float extreme = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (std::abs(values[i]) > most) {
      most = std::abs(values[i]);
      extreme = values[i];
    }
  }
  return extreme;
}

}  // namespace loadstone::simd
