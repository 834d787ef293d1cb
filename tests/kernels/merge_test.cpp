#include "kernels/merge.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/ceil_div.h"
#include "kernels/forced_target.h"
#include "kernels/task_vectors.h"
#include "support/random_numbers.h"

namespace loadstone {
namespace {

using Numbers = std::vector<float>;
using test::random_numbers;

// Compares bits, including NaN payloads and the signs of zeros.
void expect_same_bits(const Numbers& found, const Numbers& expected) {
  ASSERT_EQ(found.size(), expected.size());
  EXPECT_EQ(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)), 0);
}

// Runs the check with every supported instruction set.
template <typename Check>
void on_every_target(const Check& check) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    const ForcedTarget forced(target);
    check();
  }
}

struct Matrices {
  std::uint64_t rows, rank, columns;
  Numbers left, right, panels;

  Matrices(std::uint64_t of_rows, std::uint64_t of_rank, std::uint64_t of_columns)
      : rows(of_rows),
        rank(of_rank),
        columns(of_columns),
        left(random_numbers(rows * rank, 1)),
        right(random_numbers(rank * columns, 2)),
        panels(rank * round_up(columns, panel_columns)) {
    for (std::uint64_t k = 0; k < rank; ++k) {
      pack_row(right.data() + k * columns, k, rank, 0, columns, panels.data());
    }
  }

  // Computes one value of the product by its definition.
  [[nodiscard]] float product(std::uint64_t row, std::uint64_t column) const {
    float sum = left[row * rank] * right[column];
    for (std::uint64_t k = 1; k < rank; ++k) {
      sum = sum + left[row * rank + k] * right[k * columns + column];
    }
    return sum;
  }
};

TEST(MergeTest, SumsAreRoundedStepByStep) {
  on_every_target([] {
    for (const std::size_t count : {0u, 1u, 7u, 16u, 33u, 1000u}) {
      const Numbers numbers = random_numbers(count, 3);
      Numbers sum = random_numbers(count, 4);
      Numbers expected = sum;
      for (std::size_t i = 0; i < count; ++i) {
        expected[i] = 0.7F * expected[i];
        expected[i] = expected[i] + 0.3F * numbers[i];
      }
      scale(sum.data(), count, 0.7F);
      add_scaled(sum.data(), numbers.data(), count, 0.3F);
      expect_same_bits(sum, expected);
    }
  });
}

TEST(MergeTest, ProductsAreSummedInOrderWhereverTheyAreCut) {
  on_every_target([] {
    for (const std::uint64_t rank : {1u, 2u, 16u, 37u}) {
      for (const std::uint64_t columns : {1u, 31u, 32u, 64u, 101u}) {
        const Matrices of(9, rank, columns);
        const std::uint64_t stride = columns + 5;
        for (const std::uint64_t begin : {std::uint64_t{0}, columns / 3, columns - 1}) {
          const std::uint64_t count = columns - begin;
          Numbers sum = random_numbers(of.rows * stride, 5);
          Numbers expected = sum;
          for (std::uint64_t row = 0; row < of.rows; ++row) {
            for (std::uint64_t c = 0; c < count; ++c) {
              float& number = expected[row * stride + c];
              number = number + 0.4F * of.product(row, begin + c);
            }
          }
          add_product({.sum = sum.data(),
                       .sum_stride = stride,
                       .left = of.left.data(),
                       .panels = of.panels.data(),
                       .rank = rank,
                       .rows = of.rows,
                       .column_begin = begin,
                       .columns = count,
                       .factor = 0.4F});
          expect_same_bits(sum, expected);
        }
      }
    }
  });
}

TEST(MergeTest, NothingBesideTheBlockIsWritten) {
  const Matrices of(4, 3, 40);
  Numbers sum(4 * 50, 1.0F);
  add_product({.sum = sum.data() + 2,
               .sum_stride = 50,
               .left = of.left.data(),
               .panels = of.panels.data(),
               .rank = 3,
               .rows = 4,
               .column_begin = 1,
               .columns = 38,
               .factor = 1});
  for (std::size_t i = 0; i < sum.size(); ++i) {
    const bool is_inside = i % 50 >= 2 && i % 50 < 40;
    EXPECT_EQ(sum[i] == 1.0F, !is_inside) << i;
  }
}

TEST(MergeTest, NormsAreRoundedOnce) {
  for (const std::size_t count : {0u, 1u, 8u, 1001u}) {
    const Numbers numbers = random_numbers(count, 6);
    long double squares = 0;
    for (const float number : numbers) squares += static_cast<long double>(number) * number;
    const auto expected = static_cast<float>(std::sqrt(squares));
    const float found = norm(numbers.data(), count);
    EXPECT_LE(std::abs(std::bit_cast<std::int32_t>(found) - std::bit_cast<std::int32_t>(expected)),
              1);
  }
  const Numbers large(4, 1e30F);  // the squares of these values overflow F32
  EXPECT_FLOAT_EQ(norm(large.data(), 4), 2e30F);
}

TEST(MergeTest, SquaresAreAddedByGroup) {
  const Numbers numbers = {1, 2, 3, 1e30F, 5, 6};
  std::vector<double> sums = {0.5, 0, 0};
  add_squares(numbers.data(), 6, 2, sums.data());
  const double large = double{1e30F} * 1e30F;
  EXPECT_EQ(sums, (std::vector<double>{5.5, 9 + large, 61}));
  add_squares(numbers.data(), 3, 1, sums.data());
  EXPECT_EQ(sums, (std::vector<double>{6.5, 13 + large, 70}));
}

TEST(MergeTest, ValuesAreMultipliedByTheirFactors) {
  Numbers numbers = random_numbers(37, 8);
  const Numbers before = numbers;
  const Numbers factors = random_numbers(37, 9);
  multiply(numbers.data(), factors.data(), 37);
  for (std::size_t i = 0; i < 37; ++i) EXPECT_EQ(numbers[i], before[i] * factors[i]) << i;
}

TEST(TaskVectors, ASumOfZeroElectsThePositiveSign) {
  Numbers first = {1.0f, -2.0f, 0.0f};
  Numbers second = {-1.0f, 2.0f, -0.0f};
  const std::array<float*, 2> values = {first.data(), second.data()};
  add_elected(values, {}, first.size());
  EXPECT_EQ(first, Numbers({1.0f, 2.0f, 0.0f}));
}

}  // namespace
}  // namespace loadstone
