// Finds finite values of one float dtype that are too large for another, by comparing bits.
// Included by cast.cpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/cast.h"
#include "kernels/number.h"

namespace loadstone::overflow {

template <Dtype dtype>
using Bits = typename number::IntegerOf<element_bytes(dtype), false>::Type;

constexpr unsigned mantissa_bits(Dtype dtype) {
  return static_cast<unsigned>(dtype_info(dtype).format.digits - 1);
}
constexpr unsigned magnitude_bits(Dtype dtype) {
  return bits(dtype) - (dtype_info(dtype).is_signed ? 1u : 0u);
}

// Returns the first magnitude that is not finite. A magnitude is a value's bits without the sign,
// which grow with the absolute value.
constexpr std::uint64_t end_of_finite(Dtype dtype) {
  const std::uint64_t all = std::uint64_t{1} << (magnitude_bits(dtype) - 1);
  const std::uint64_t top = all - 1 + all;
  const bool is_ieee = dtype_info(dtype).format.non_finite == NonFinite::ieee;
  return is_ieee ? top >> mantissa_bits(dtype) << mantissa_bits(dtype) : top;
}

// Returns the smallest magnitude of `source` that is too large for `target`. It is the target's
// largest value plus half of its last digit, or just above this if the target has no infinities.
constexpr std::uint64_t first_beyond(Dtype source, Dtype target) {
  const FloatFormat& from = dtype_info(source).format;
  const FloatFormat& to = dtype_info(target).format;
  if (source == Dtype::f64 && target != Dtype::f32) {
    // The cast rounds to F32 first.
    const auto single = static_cast<std::uint32_t>(first_beyond(Dtype::f32, target));
    const double middle =
        (double{std::bit_cast<float>(single - 1)} + double{std::bit_cast<float>(single)}) / 2;
    return std::bit_cast<std::uint64_t>(middle) + (single & 1u);
  }
  if (to.largest > from.largest) return end_of_finite(source);
  const bool is_ieee = to.non_finite == NonFinite::ieee;
  // The largest value plus half of its last digit, in units of 2^(largest - digits).
  const std::uint64_t limit = (std::uint64_t{1} << (to.digits + 1)) - (is_ieee ? 1u : 3u);
  const std::uint64_t fraction = limit - (std::uint64_t{1} << to.digits);
  const unsigned own = mantissa_bits(source);
  const auto given = static_cast<unsigned>(to.digits);
  const std::uint64_t unit = std::uint64_t{1} << (given > own ? given - own : 0);
  std::uint64_t mantissa = given > own ? (fraction + unit - 1) / unit : fraction << (own - given);
  const bool is_exact = fraction % unit == 0;
  if (!is_ieee && is_exact) ++mantissa;
  // F8_E8M0 has no subnormals.
  const auto bias = static_cast<std::uint64_t>((own > 0 ? 1 : 0) - from.smallest) - own;
  return ((static_cast<std::uint64_t>(to.largest) + bias) << own) + mantissa;
}

template <Dtype source>
inline Bits<source> magnitude(const std::byte* from) noexcept {
  constexpr auto mask =
      static_cast<Bits<source>>((std::uint64_t{1} << (magnitude_bits(source) - 1)) * 2 - 1);
  return static_cast<Bits<source>>(number::load_raw<Bits<source>>(from) & mask);
}

// Returns true if any magnitude is at least `first`. Uses only sums and bit operations, so that the
// compiler can vectorize the loop.
template <Dtype source>
bool any_from(std::uint64_t first, const std::byte* from, std::uint64_t count) noexcept {
  using Word = Bits<source>;
  constexpr auto top = static_cast<Word>(std::uint64_t{1} << magnitude_bits(source));
  const auto rest = static_cast<Word>(top - first);
  Word all = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    all = static_cast<Word>(all | (magnitude<source>(from + i * sizeof(Word)) + rest));
  }
  return (all & top) != 0;
}

template <Dtype source, Dtype target>
Overflow count(const std::byte* from, std::uint64_t stride, std::uint64_t count) noexcept {
  constexpr std::uint64_t first = first_beyond(source, target);
  constexpr std::uint64_t end = end_of_finite(source);
  constexpr std::size_t size = sizeof(Bits<source>);
  Overflow found;
  if constexpr (dtype_info(source).is_signed) {
    if (stride == 1 && !any_from<source>(first, from, count)) return found;
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::byte* const at = from + i * stride * size;
    const std::uint64_t each = magnitude<source>(at);
    if (each < first || each >= end) continue;
    ++found.count;
    const double value = static_cast<double>(number::load<source>(at));
    found.largest = std::max(found.largest, value < 0 ? -value : value);
  }
  return found;
}

// Returns the index of the first non-finite element, or `count`.
template <Dtype source>
std::uint64_t finite(const std::byte* from, std::uint64_t count) noexcept {
  constexpr std::uint64_t step = 1024;
  constexpr std::uint64_t end = end_of_finite(source);
  constexpr std::size_t size = sizeof(Bits<source>);
  for (std::uint64_t begin = 0; begin < count; begin += step) {
    const std::uint64_t some = std::min(step, count - begin);
    if constexpr (dtype_info(source).is_signed) {
      if (!any_from<source>(end, from + begin * size, some)) continue;
    }
    for (std::uint64_t i = begin; i < begin + some; ++i) {
      if (magnitude<source>(from + i * size) >= end) return i;
    }
  }
  return count;
}

// Returns null if the target represents all finite values of the source, or if either is not a
// float.
template <Dtype source, Dtype target>
constexpr CountOverflow counter() {
  if constexpr (kind(source) != DtypeKind::floating || kind(target) != DtypeKind::floating) {
    return nullptr;
  } else if constexpr (first_beyond(source, target) >= end_of_finite(source)) {
    return nullptr;
  } else {
    return count<source, target>;
  }
}

}  // namespace loadstone::overflow
