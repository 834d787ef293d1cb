// Positions of a window's elements in the components of the encodings in modelopt.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/modelopt/scales.h"
#include "kernels/quantize.h"

namespace loadstone {

[[nodiscard]] inline std::uint64_t width(Dtype dtype) { return bits(dtype) / 8; }

// Returns the byte offset in a component for element `at`, which begins a window or ends the
// tensor.
[[nodiscard]] std::uint64_t place_in_part(const QuantizedLayout& form, std::size_t part,
                                          std::uint64_t at) noexcept;

// A run of elements within one matrix or one row.
struct WindowRun {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t matrix = 0;
  [[nodiscard]] std::uint64_t size() const noexcept { return end - begin; }
};

// Divides the window into runs that end at multiples of `length`, and calls encode(run) for each.
// encode() returns the index in the run of the first non-finite value, or the run's size. Returns
// the index of the first non-finite value of the window, or `end`.
template <class Encode>
std::uint64_t by_runs(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end,
                      std::uint64_t length, Encode encode) {
  std::uint64_t first_wrong = end;
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t stop = std::min(end, (at / length + 1) * length);
    const std::uint64_t good = encode(WindowRun{at, stop, at / form.matrix_elements()});
    if (good < stop - at) first_wrong = std::min(first_wrong, at + good);
    at = stop;
  }
  return first_wrong;
}

// A window and its components. Converts indices of elements to addresses.
template <class Byte, class Number>
struct Cut {
  const QuantizedLayout& form;
  std::uint64_t begin;
  std::uint64_t end;
  Number* numbers;
  std::uint64_t number_bytes;
  std::span<Byte* const> parts;

  [[nodiscard]] Number* numbers_at(std::uint64_t at) const {
    return numbers + (at - begin) * number_bytes;
  }
  [[nodiscard]] Byte* part_at(std::size_t part, std::uint64_t at) const {
    return parts[part] + (place_in_part(form, part, at) - place_in_part(form, part, begin));
  }
};
using Encoded = Cut<std::byte, const std::byte>;
using Decoded = Cut<const std::byte, std::byte>;

// Calls each(first element, rows, columns, index of the block in the window) for each block of
// 128 x 128 in the window.
template <class Each>
void by_blocks(const QuantizedLayout& form, std::uint64_t begin, std::uint64_t end, Each each) {
  constexpr std::uint64_t block = scaled::fp8_block;
  std::uint64_t count = 0;
  for (std::uint64_t row = begin / form.columns; row < end / form.columns;) {
    const std::uint64_t rows = std::min(block, form.rows - row % form.rows);
    for (std::uint64_t column = 0; column < form.columns; column += block) {
      each(row * form.columns + column, rows, std::min(block, form.columns - column), count++);
    }
    row += rows;
  }
}

}  // namespace loadstone
