// Arithmetic on the differences between models and their base ("task vectors"), in F32 and rounded
// step by step; the result does not depend on how values are divided among calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace loadstone {

// numbers[i] = numbers[i] - base[i]
void subtract(float* numbers, const float* base, std::uint64_t count) noexcept;

// numbers[i] = numbers[i] / divisor
void divide(float* numbers, std::uint64_t count, float divisor) noexcept;

// Keeps element `index` of a tensor, divided by the density, or makes it 0. The choice depends only
// on key and index: the first 32 bits of a SplitMix64 generator, `index` + 1 steps after `key`,
// must be below density * 2^32.
void drop_random(float* numbers, std::uint64_t index, std::uint64_t count, std::uint64_t key,
                 double density) noexcept;
// A key for each seed, text and number.
[[nodiscard]] std::uint64_t random_key(std::uint64_t seed, std::span<const char> text,
                                       std::uint64_t number) noexcept;

// Makes values with a magnitude below the threshold 0.
void drop_small(float* numbers, std::uint64_t count, float threshold) noexcept;

// Magnitudes are counted twice to find the n-th largest: by the upper bits of their F32, and those
// that have the wanted ones by the lower bits.
inline constexpr std::size_t magnitude_bins = 1u << 16;
void count_upper(const float* numbers, std::uint64_t count, std::uint64_t* bins) noexcept;
void count_lower(const float* numbers, std::uint64_t count, std::uint32_t upper,
                 std::uint64_t* bins) noexcept;
// Returns the bin of the n-th largest, counted from 1; `n` becomes its rank within the bin.
[[nodiscard]] std::uint32_t bin_of_largest(const std::uint64_t* bins, std::uint64_t& n) noexcept;
[[nodiscard]] float magnitude_of_bins(std::uint32_t upper, std::uint32_t lower) noexcept;

// values[0][i] = the sum of those values[k][i], in order, that have the sign of the total. Zeros do
// not count; a total of zero is positive. `factors`: if not empty, the sum is divided by the sum of
// its values' factors; a divisor of zero is 1.
void add_elected(std::span<float* const> values, std::span<const float> factors,
                 std::uint64_t count) noexcept;

// Sums of a * a, b * b and a * b in F64, each in eight lanes like norm(). Accumulates.
struct DotSums {
  double a = 0;
  double b = 0;
  double ab = 0;
};
void add_dots(const float* a, const float* b, std::uint64_t count, DotSums& sums) noexcept;

}  // namespace loadstone
