// Defines reference tensors, whose elements are moved and cast one at a time. All faster code must
// give the same results.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "loadstone/dtype.h"
#include "loadstone/recipe.h"
#include "loadstone/shape.h"

namespace loadstone::fuzz {

// A tensor in C order with `width` bytes per element; sub-byte elements take one byte each.
struct NaiveTensor {
  Shape shape;
  Dtype dtype = Dtype::u8;
  std::vector<std::uint8_t> bytes;

  [[nodiscard]] std::size_t width() const noexcept { return (bits(dtype) + 7) / 8; }
  [[nodiscard]] std::uint64_t numel() const { return shape.numel().value_or(0); }
};

// Unpacks bytes of a file or of memory, where the first sub-byte element is in the lowest bits.
[[nodiscard]] NaiveTensor unpacked(const std::vector<std::uint8_t>& bytes, Shape shape,
                                   Dtype dtype);
[[nodiscard]] std::vector<std::uint8_t> packed(const NaiveTensor& tensor);

// Casts floats of 8 to 64 bits to each other, and integers to floats. A cast to the same dtype
// changes nothing.
[[nodiscard]] bool naive_can_cast(Dtype source, Dtype target);
[[nodiscard]] NaiveTensor naive_cast(const NaiveTensor& tensor, Dtype dtype);
// Returns true if all elements have equal bytes, or are both NaN if `dtype` is floating.
[[nodiscard]] bool same_numbers(const std::vector<std::uint8_t>& first,
                                const std::vector<std::uint8_t>& second, Dtype dtype);
[[nodiscard]] double naive_number(const std::uint8_t* bytes, Dtype dtype);

[[nodiscard]] NaiveTensor naive_permute(const NaiveTensor& tensor,
                                        const std::vector<std::size_t>& order);
[[nodiscard]] NaiveTensor naive_slice(const NaiveTensor& tensor, std::size_t dim,
                                      std::uint64_t start, std::uint64_t size, std::uint64_t step);
[[nodiscard]] NaiveTensor naive_concat(const std::vector<NaiveTensor>& tensors, std::size_t dim);
[[nodiscard]] NaiveTensor naive_stack(const std::vector<NaiveTensor>& tensors, std::size_t dim);
// Copies the elements of the box.
void naive_copy(const Box& box, const NaiveTensor& source, NaiveTensor& target);

}  // namespace loadstone::fuzz
