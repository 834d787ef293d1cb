#include "kernels/task_vectors.h"

#include <array>
#include <bit>
#include <cmath>

namespace loadstone {

namespace {

constexpr std::uint32_t magnitude_mask = 0x7fffffff;
constexpr unsigned lower_bits = 15;
constexpr std::uint64_t step = 0x9e3779b97f4a7c15;

std::uint64_t mixed(std::uint64_t bits) noexcept {
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

std::uint32_t magnitude(float number) noexcept {
  return std::bit_cast<std::uint32_t>(number) & magnitude_mask;
}

}  // namespace

void subtract(float* numbers, const float* base, std::uint64_t count) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) numbers[i] = numbers[i] - base[i];
}

void divide(float* numbers, std::uint64_t count, float divisor) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) numbers[i] = numbers[i] / divisor;
}

void drop_random(float* numbers, std::uint64_t index, std::uint64_t count, std::uint64_t key,
                 double density) noexcept {
  const auto limit = static_cast<std::uint64_t>(std::ceil(density * 4294967296.0));
  const auto divisor = static_cast<float>(density);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t random = mixed(key + (index + i + 1) * step);
    numbers[i] = (random >> 32) < limit ? numbers[i] / divisor : 0.0F;
  }
}

std::uint64_t random_key(std::uint64_t seed, std::span<const char> text,
                         std::uint64_t number) noexcept {
  std::uint64_t key = mixed(seed + step);
  for (const char character : text) {
    key = mixed((key ^ static_cast<unsigned char>(character)) + step);
  }
  return mixed((key ^ number) + step);
}

void drop_small(float* numbers, std::uint64_t count, float threshold) noexcept {
  const std::uint32_t least = magnitude(threshold);
  for (std::uint64_t i = 0; i < count; ++i) {
    numbers[i] = magnitude(numbers[i]) >= least ? numbers[i] : 0.0F;
  }
}

void count_upper(const float* numbers, std::uint64_t count, std::uint64_t* bins) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) ++bins[magnitude(numbers[i]) >> lower_bits];
}

void count_lower(const float* numbers, std::uint64_t count, std::uint32_t upper,
                 std::uint64_t* bins) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = magnitude(numbers[i]);
    if (bits >> lower_bits == upper) ++bins[bits & ((1u << lower_bits) - 1)];
  }
}

std::uint32_t bin_of_largest(const std::uint64_t* bins, std::uint64_t& n) noexcept {
  for (std::uint32_t bin = magnitude_bins; bin-- > 0;) {
    if (bins[bin] >= n) return bin;
    n -= bins[bin];
  }
  return 0;
}

float magnitude_of_bins(std::uint32_t upper, std::uint32_t lower) noexcept {
  return std::bit_cast<float>(upper << lower_bits | lower);
}

void add_elected(std::span<float* const> values, std::span<const float> factors,
                 std::uint64_t count) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) {
    float all = values[0][i];
    for (std::size_t k = 1; k < values.size(); ++k) all = all + values[k][i];
    const bool is_positive = all >= 0;
    float sum = 0;
    float divisor = 0;
    for (std::size_t k = 0; k < values.size(); ++k) {
      const float number = values[k][i];
      if (is_positive ? !(number > 0) : !(number < 0)) continue;
      sum = sum + number;
      if (!factors.empty()) divisor = divisor + factors[k];
    }
    // If `all` is NaN, no sign is elected, and the result must be NaN too.
    if (std::isnan(all)) sum = all;
    values[0][i] = divisor == 0 ? sum : sum / divisor;
  }
}

void add_dots(const float* a, const float* b, std::uint64_t count, DotSums& sums) noexcept {
  constexpr std::size_t lanes = 8;
  std::array<double, lanes> squares_a = {};
  std::array<double, lanes> squares_b = {};
  std::array<double, lanes> products = {};
  for (std::uint64_t i = 0; i < count; ++i) {
    const double x = a[i];
    const double y = b[i];
    squares_a[i % lanes] += x * x;
    squares_b[i % lanes] += y * y;
    products[i % lanes] += x * y;
  }
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    sums.a += squares_a[lane];
    sums.b += squares_b[lane];
    sums.ab += products[lane];
  }
}

}  // namespace loadstone
