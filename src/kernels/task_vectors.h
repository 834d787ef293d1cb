// Arithmetic on the differences between models and their base ("task vectors"). Each step is
// rounded to F32. The result does not depend on how values are divided into calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace loadstone {

// Computes numbers[i] = numbers[i] - base[i].
void subtract(float* numbers, const float* base, std::uint64_t count) noexcept;

// Computes numbers[i] = numbers[i] / divisor.
void divide(float* numbers, std::uint64_t count, float divisor) noexcept;

// For each of `count` values, from element `index` of the tensor on: divides it by the density, or
// replaces it by 0. The choice depends only on `key` and the element's index i. A value is kept if
// the first 32 bits of a SplitMix64 generator, i + 1 steps after `key`, are below density * 2^32.
void drop_random(float* numbers, std::uint64_t index, std::uint64_t count, std::uint64_t key,
                 double density) noexcept;
// Returns a key for drop_random() that depends on all arguments.
[[nodiscard]] std::uint64_t random_key(std::uint64_t seed, std::span<const char> text,
                                       std::uint64_t number) noexcept;

// Replaces values with a magnitude below the threshold by 0.
void drop_small(float* numbers, std::uint64_t count, float threshold) noexcept;

// Two counts of magnitudes find the n-th largest one. The first counts the upper bits of their F32,
// the second the lower bits of those magnitudes that have the upper bits of the n-th largest.
inline constexpr std::size_t magnitude_bins = 1u << 16;
void count_upper(const float* numbers, std::uint64_t count, std::uint64_t* bins) noexcept;
void count_lower(const float* numbers, std::uint64_t count, std::uint32_t upper,
                 std::uint64_t* bins) noexcept;
// Returns the bin of the n-th largest magnitude, counted from 1. Sets `n` to its rank in the bin.
[[nodiscard]] std::uint32_t bin_of_largest(const std::uint64_t* bins, std::uint64_t& n) noexcept;
[[nodiscard]] float magnitude_of_bins(std::uint32_t upper, std::uint32_t lower) noexcept;

// Sets values[0][i] to the sum of those values[k][i], in order, that have the same sign as the sum
// of all values[k][i]. Zeros do not count, and a sum of zero is positive. If `factors` is not
// empty, divides by the sum of the factors of the added values, unless this sum is 0.
void add_elected(std::span<float* const> values, std::span<const float> factors,
                 std::uint64_t count) noexcept;

// Sums of a * a, b * b and a * b in F64, each in eight lanes like norm(). add_dots() adds to them.
struct DotSums {
  double a = 0;
  double b = 0;
  double ab = 0;
};
void add_dots(const float* a, const float* b, std::uint64_t count, DotSums& sums) noexcept;

}  // namespace loadstone
