// Bounds on the distance of a value from its decoded code. No bound is measured or tuned: all
// follow from the codes and the rounding of scales, for encoders that choose the nearest code. They
// apply to every single value; the root mean square error of ordinary weights is 2 to 5 times
// smaller.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "loadstone/dtype.h"

namespace loadstone {

// |value - decoded| <= relative * |value| + of_reach * reach + of_outer * outer + constant. `reach`
// is the decoded magnitude of the largest code with the value's scale. `outer`, if scales are codes
// themselves, is the decoded magnitude of the largest code with the largest code of a scale. Both
// are computed by decoding the stored scales with all codes replaced by `top_code`, and scale codes
// by `top_scale`. So they are exact even for partly read blocks, shared scales and nested scales.
// The bound still detects a wrong scale: a factor k adds |k - 1| * |value| to the error, but
// multiplies only of_reach * reach in the bound, which is a small part of it.
struct ErrorBound {
  double relative = 0;
  double of_reach = 0;
  double of_outer = 0;
  double constant = 0;
  // Dtype of the data. U8 means 4-bit codes, stored as bytes in any dtype.
  Dtype data = Dtype::u8;
  std::byte top_code{};
  std::byte top_scale{};
};

namespace error_bound {

constexpr double power_of_two(int exponent) noexcept {
  double value = 1;
  for (; exponent > 0; --exponent) value *= 2;
  for (; exponent < 0; ++exponent) value /= 2;
  return value;
}

// Allowance for intermediate rounding: ModelOpt rounds quotients to BF16 before it encodes them
// (2^-9 of the value), and its export rounds a scale again (2^-8).
inline constexpr double rounded_on_the_way = power_of_two(-7);

// Returns the bound of floats, which are at most half a step from the value: 2^-p of the value for
// p digits, and half of the smallest code among subnormals. The latter is expressed as a fraction
// of the largest code, whose digits are all ones, or one less if that code is NaN.
constexpr ErrorBound of_floats(Dtype dtype, std::byte top_code, Dtype data) noexcept {
  const FloatFormat format = dtype_info(dtype).format;
  const double last = power_of_two(1 - format.digits);
  const double largest = (2 - (format.non_finite == NonFinite::all_ones ? 2 : 1) * last) *
                         power_of_two(format.largest);
  return {.relative = power_of_two(-format.digits) + rounded_on_the_way,
          .of_reach = power_of_two(format.smallest - 1) / largest,
          .data = data,
          .top_code = top_code};
}

// Returns the bound of the integers up to `most`: half a step of 1.
constexpr ErrorBound of_integers(unsigned most, std::byte top_code, Dtype data) noexcept {
  return {
      .relative = rounded_on_the_way, .of_reach = 0.5 / most, .data = data, .top_code = top_code};
}

// Returns the bound of a table of values whose largest magnitude is 1. Up to a quarter of the
// reach, the bound is half of the widest gap. For a wider gap further out, the excess is expressed
// as a fraction of the value: the largest excess is in the middle of the gap, where the error is
// largest.
template <std::size_t count>
constexpr ErrorBound of_table(std::array<float, count> values, std::byte top_code) noexcept {
  std::ranges::sort(values);
  const auto half_gap = [&](std::size_t i) { return (double{values[i + 1]} - values[i]) / 2; };
  const auto middle = [&](std::size_t i) {
    const double place = (double{values[i + 1]} + values[i]) / 2;
    return place < 0 ? -place : place;
  };
  double near_zero = 0;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    if (middle(i) <= 0.25) near_zero = std::max(near_zero, half_gap(i));
  }
  double relative = 0;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    if (middle(i) > 0.25) relative = std::max(relative, (half_gap(i) - near_zero) / middle(i));
  }
  return {.relative = relative + rounded_on_the_way, .of_reach = near_zero, .top_code = top_code};
}

// Extends a bound to encoders that give values of up to `over` times the reach the largest code.
// The error of the largest such value is (over - 1) * reach.
constexpr ErrorBound clamped(ErrorBound bound, double over) noexcept {
  bound.relative = std::max(bound.relative, (over - 1 - bound.of_reach) / over);
  return bound;
}

// Extends a bound to quantized scales. A stored scale can differ by `off` times the largest scale
// from the scale that divided the values. The range of the values then differs by `off` * `outer`.
constexpr ErrorBound with_scale_codes(ErrorBound bound, double off, std::byte top_scale) noexcept {
  bound.of_outer = (1 + bound.of_reach) * off;
  bound.top_scale = top_scale;
  return bound;
}

}  // namespace error_bound

}  // namespace loadstone
