// Bounds on the distance of a value from its decoded code. Nothing here is measured or tuned: all
// bounds follow from the codes and the rounding of scales, for encoders that choose the nearest
// code. They apply to every value; the root mean square error of ordinary weights is 2 to 5 times
// smaller.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "loadstone/dtype.h"

namespace loadstone {

// |value - decoded| <= relative * |value| + of_reach * reach + of_outer * outer + constant.
// `reach` is the magnitude of the largest code with the value's scale. If scales are codes
// themselves, `outer` is that of the largest code with the largest code of a scale. Both are
// decoded from stored scales, with all codes replaced by `top_code`, and by `top_scale`: so they
// are exact for partly read blocks, shared scales and scales of scales. A wrong scale is still
// detected: a factor k adds |k - 1| * |value| to the error, and multiplies only of_reach * reach in
// the bound, a small part of it.
struct ErrorBound {
  double relative = 0;
  double of_reach = 0;
  double of_outer = 0;
  double constant = 0;
  // Dtype of the data with this bound; U8: codes of 4 bits, in bytes of any dtype.
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

// ModelOpt rounds quotients to BF16 before it encodes them (2^-9 of the value), and its export
// rounds a scale again (2^-8).
inline constexpr double rounded_on_the_way = power_of_two(-7);

// Floats are at most half a step from the nearest: 2^-p of the value with p digits, and half the
// smallest among subnormals. Expressed as a part of the largest, whose digits are all ones; one
// less if that code is NaN.
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

// Integers up to `most` are half a step of 1 from their neighbours.
constexpr ErrorBound of_integers(unsigned most, std::byte top_code, Dtype data) noexcept {
  return {
      .relative = rounded_on_the_way, .of_reach = 0.5 / most, .data = data, .top_code = top_code};
}

// Codes of a table whose largest magnitude is 1. Near zero, up to a quarter of the reach, the bound
// is half of the widest gap. Beyond, what half of a gap has more than this is a part of the number:
// the largest one in the middle of the gap, where the error is.
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

// Values of up to `over` times the reach still get the largest code. The error of the largest is
// then over - 1 of the reach.
constexpr ErrorBound clamped(ErrorBound bound, double over) noexcept {
  bound.relative = std::max(bound.relative, (over - 1 - bound.of_reach) / over);
  return bound;
}

// Scales are quantized too: a stored scale can differ by `off` of the largest scale from the one
// that divided the values, and their range by the same share of `outer`.
constexpr ErrorBound with_scale_codes(ErrorBound bound, double off, std::byte top_scale) noexcept {
  bound.of_outer = (1 + bound.of_reach) * off;
  bound.top_scale = top_scale;
  return bound;
}

}  // namespace error_bound

}  // namespace loadstone
