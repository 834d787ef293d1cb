// Arithmetic of merges in F32. Results have the same bytes on every instruction set, and for any
// division of a tensor into calls: nothing is fused or reordered, and each operation is rounded
// separately.
#pragma once

#include <cstddef>
#include <cstdint>

namespace loadstone {

// Computes numbers[i] = factor * numbers[i].
void scale(float* numbers, std::uint64_t count, float factor) noexcept;

// Computes sum[i] = sum[i] + factor * numbers[i].
void add_scaled(float* sum, const float* numbers, std::uint64_t count, float factor) noexcept;

// Computes numbers[i] = numbers[i] * factors[i].
void multiply(float* numbers, const float* factors, std::uint64_t count) noexcept;

// Adds the square of each value in F64 to the sum of its group of `group` adjacent values.
void add_squares(const float* numbers, std::uint64_t count, std::uint64_t group,
                 double* sums) noexcept;

// Returns the square root of the sum of squares. Sums in F64 and rounds once. First adds the values
// whose indices have the same remainder modulo 8, in order, and then these eight sums, in order.
[[nodiscard]] float norm(const float* numbers, std::uint64_t count) noexcept;

// The right matrix of a product is stored in panels of this many columns, so that operands stay in
// the L1 cache: all rows of columns 0 to 31, then all rows of columns 32 to 63, and so on. The last
// panel is padded.
inline constexpr std::size_t panel_columns = 32;

// Copies the columns [begin, begin + count) of row `row` to their panels. The matrix has `rows`
// rows.
void pack_row(const float* numbers, std::uint64_t row, std::uint64_t rows, std::uint64_t begin,
              std::uint64_t count, float* panels) noexcept;

// A rectangle of a matrix to which a product is added.
struct ProductBlock {
  float* sum = nullptr;           // first row and column of the rectangle
  std::uint64_t sum_stride = 0;   // elements from one row of the matrix to the next
  const float* left = nullptr;    // [rows, rank], from the first row of the rectangle
  const float* panels = nullptr;  // the whole right matrix, packed by pack_row()
  std::uint64_t rank = 0;
  std::uint64_t rows = 0;
  std::uint64_t column_begin = 0;  // first column of the right matrix
  std::uint64_t columns = 0;
  float factor = 1;
};

// Computes sum = sum + factor * product, where product[i, j] = ((left[i, 0] * right[0, j] +
// left[i, 1] * right[1, j]) + ...).
void add_product(const ProductBlock& block) noexcept;

}  // namespace loadstone
