#pragma once

#include <cstddef>
#include <random>
#include <vector>

namespace loadstone::test {

// Returns normally distributed values. They depend only on the arguments.
[[nodiscard]] inline std::vector<float> random_numbers(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

}  // namespace loadstone::test
