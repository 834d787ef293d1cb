// Arithmetic of merges in F32: the same bytes on every instruction set, and for any division into
// calls. Nothing is fused or reordered: each operation is rounded separately.
#pragma once

#include <cstddef>
#include <cstdint>

namespace loadstone {

// numbers[i] = factor * numbers[i]
void scale(float* numbers, std::uint64_t count, float factor) noexcept;

// sum[i] = sum[i] + factor * numbers[i]
void add_scaled(float* sum, const float* numbers, std::uint64_t count, float factor) noexcept;

// The square root of the sum of squares. It is summed in F64 and rounded once: the numbers whose
// indices have the same remainder modulo 8 in order, and then these eight sums in order.
[[nodiscard]] float norm(const float* numbers, std::uint64_t count) noexcept;

// Right matrices of products are stored in panels, so that operands stay in the nearest cache: all
// rows of columns 0 to 31, then all of columns 32 to 63 ...; the last panel is padded.
inline constexpr std::size_t panel_columns = 32;

// Copies columns [begin, begin + count) of row `row`, of a matrix with `rows` rows, to their
// panels.
void pack_row(const float* numbers, std::uint64_t row, std::uint64_t rows, std::uint64_t begin,
              std::uint64_t count, float* panels) noexcept;

// A rectangle of a sum that a product is added to.
struct ProductBlock {
  float* sum = nullptr;           // of its first row and column
  std::uint64_t sum_stride = 0;   // from one row to the next
  const float* left = nullptr;    // of its first row: [rows, rank]
  const float* panels = nullptr;  // the whole right matrix, see pack_row()
  std::uint64_t rank = 0;
  std::uint64_t rows = 0;
  std::uint64_t column_begin = 0;  // of the right matrix
  std::uint64_t columns = 0;
  float factor = 1;
};

// sum = sum + factor * product, where product[i, j] = ((left[i, 0] * right[0, j] + left[i, 1] *
// right[1, j]) + ...).
void add_product(const ProductBlock& block) noexcept;

}  // namespace loadstone
