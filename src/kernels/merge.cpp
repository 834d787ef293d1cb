#include "kernels/merge.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

// Highway compiles this file once for each instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/merge.cpp"
#include <hwy/foreach_target.h>
// Highway requires this include after foreach_target.h.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace loadstone::simd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;  // at most half a panel, because add_tile() uses two vectors
using V = hn::Vec<F32>;

void Scale(float* numbers, std::uint64_t count, float factor) {
  const F32 d;
  const std::size_t lanes = hn::Lanes(d);
  const V factors = hn::Set(d, factor);
  std::uint64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::Mul(factors, hn::LoadU(d, numbers + i)), d, numbers + i);
  }
  for (; i < count; ++i) numbers[i] = factor * numbers[i];
}

void AddScaled(float* sum, const float* numbers, std::uint64_t count, float factor) {
  const F32 d;
  const std::size_t lanes = hn::Lanes(d);
  const V factors = hn::Set(d, factor);
  std::uint64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const V term = hn::Mul(factors, hn::LoadU(d, numbers + i));
    hn::StoreU(hn::Add(hn::LoadU(d, sum + i), term), d, sum + i);
  }
  for (; i < count; ++i) sum[i] = sum[i] + factor * numbers[i];
}

// Adds the product to `rows` rows of two vectors each. `right` points to the first of their
// columns in its panel.
template <std::size_t rows>
HWY_INLINE void add_tile(const ProductBlock& block, const float* left, const float* right,
                         float* sum) {
  const F32 d;
  const std::size_t lanes = hn::Lanes(d);
  V products[rows][2];
  for (std::size_t r = 0; r < rows; ++r) {
    const V factors = hn::Set(d, left[r * block.rank]);
    products[r][0] = hn::Mul(factors, hn::LoadU(d, right));
    products[r][1] = hn::Mul(factors, hn::LoadU(d, right + lanes));
  }
  for (std::uint64_t k = 1; k < block.rank; ++k) {
    const float* const at = right + k * panel_columns;
    const V first = hn::LoadU(d, at);
    const V second = hn::LoadU(d, at + lanes);
    for (std::size_t r = 0; r < rows; ++r) {
      const V factors = hn::Set(d, left[r * block.rank + k]);
      products[r][0] = hn::Add(products[r][0], hn::Mul(factors, first));
      products[r][1] = hn::Add(products[r][1], hn::Mul(factors, second));
    }
  }
  const V factors = hn::Set(d, block.factor);
  for (std::size_t r = 0; r < rows; ++r) {
    float* const to = sum + r * block.sum_stride;
    hn::StoreU(hn::Add(hn::LoadU(d, to), hn::Mul(factors, products[r][0])), d, to);
    hn::StoreU(hn::Add(hn::LoadU(d, to + lanes), hn::Mul(factors, products[r][1])), d, to + lanes);
  }
}

// Adds the product to the columns of a panel that do not fill two vectors.
void add_columns(const ProductBlock& block, const float* right, std::uint64_t begin,
                 std::uint64_t end, float* sum) {
  for (std::uint64_t r = 0; r < block.rows; ++r) {
    const float* const left = block.left + r * block.rank;
    for (std::uint64_t c = begin; c < end; ++c) {
      float product = left[0] * right[c];
      for (std::uint64_t k = 1; k < block.rank; ++k) {
        product = product + left[k] * right[k * panel_columns + c];
      }
      float& to = sum[r * block.sum_stride + (c - begin)];
      to = to + block.factor * product;
    }
  }
}

void AddProduct(const ProductBlock& block) {
  const std::uint64_t step = 2 * hn::Lanes(F32());
  const std::uint64_t end = block.column_begin + block.columns;
  for (std::uint64_t column = block.column_begin; column < end;) {
    const std::uint64_t in_panel = column % panel_columns;
    const float* const right = block.panels + (column - in_panel) * block.rank;
    float* const sum = block.sum + (column - block.column_begin);
    const std::uint64_t room = std::min<std::uint64_t>(panel_columns - in_panel, end - column);
    if (room < step) {
      add_columns(block, right, in_panel, in_panel + room, sum);
      column += room;
      continue;
    }
    std::uint64_t r = 0;
    for (; r + 4 <= block.rows; r += 4) {
      add_tile<4>(block, block.left + r * block.rank, right + in_panel, sum + r * block.sum_stride);
    }
    for (; r < block.rows; ++r) {
      add_tile<1>(block, block.left + r * block.rank, right + in_panel, sum + r * block.sum_stride);
    }
    column += step;
  }
}

}  // namespace loadstone::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace loadstone {

namespace simd {

HWY_EXPORT(Scale);
HWY_EXPORT(AddScaled);
HWY_EXPORT(AddProduct);

}  // namespace simd

void scale(float* numbers, std::uint64_t count, float factor) noexcept {
  using namespace simd;
  HWY_DYNAMIC_DISPATCH(Scale)(numbers, count, factor);
}

void add_scaled(float* sum, const float* numbers, std::uint64_t count, float factor) noexcept {
  using namespace simd;
  HWY_DYNAMIC_DISPATCH(AddScaled)(sum, numbers, count, factor);
}

void add_product(const ProductBlock& block) noexcept {
  using namespace simd;
  HWY_DYNAMIC_DISPATCH(AddProduct)(block);
}

void multiply(float* numbers, const float* factors, std::uint64_t count) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) numbers[i] = numbers[i] * factors[i];
}

void add_squares(const float* numbers, std::uint64_t count, std::uint64_t group,
                 double* sums) noexcept {
  for (std::uint64_t begin = 0; begin < count; begin += group) {
    const std::uint64_t end = std::min(begin + group, count);
    for (std::uint64_t i = begin; i < end; ++i) {
      const double number = numbers[i];
      *sums += number * number;
    }
    ++sums;
  }
}

float norm(const float* numbers, std::uint64_t count) noexcept {
  std::array<double, 8> sums = {};
  for (std::uint64_t i = 0; i < count; ++i) {
    const double number = numbers[i];
    sums[i % sums.size()] += number * number;
  }
  double sum = 0;
  for (const double each : sums) sum += each;
  return static_cast<float>(std::sqrt(sum));
}

void pack_row(const float* numbers, std::uint64_t row, std::uint64_t rows, std::uint64_t begin,
              std::uint64_t count, float* panels) noexcept {
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t column = begin + done;
    const std::uint64_t in_panel = column % panel_columns;
    const std::uint64_t run = std::min<std::uint64_t>(panel_columns - in_panel, count - done);
    std::memcpy(panels + (column - in_panel) * rows + row * panel_columns + in_panel,
                numbers + done, run * sizeof(float));
    done += run;
  }
}

}  // namespace loadstone
#endif
