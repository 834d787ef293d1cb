#pragma once

#include <cstddef>
#include <random>
#include <vector>

namespace loadstone::test {

// Values of a normal distribution; deterministic per seed.
[[nodiscard]] inline std::vector<float> random_numbers(std::size_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(count);
  for (float& number : numbers) number = normal(generator);
  return numbers;
}

}  // namespace loadstone::test
