#include "boxes/copy_box.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "support/files.h"

namespace loadstone {
namespace {

using Bytes = std::vector<std::byte>;

Bytes pattern(std::size_t count, unsigned seed) {
  const std::string text = test::some_bytes(count, seed);
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::uint64_t span_of(const std::vector<BoxDim>& dims, bool source) {
  std::uint64_t span = 1;
  for (const BoxDim& dim : dims) {
    span += (dim.extent - 1) * (source ? dim.source_stride : dim.target_stride);
  }
  return span;
}

// Compares copy_box() with a loop over elements; bytes between the elements must not change.
void compare(const std::vector<BoxDim>& dims, Dtype source, Dtype target) {
  const std::size_t from_size = element_bytes(source);
  const std::size_t to_size = element_bytes(target);
  const Cast cast = cast_between(source, target);
  const Bytes from = pattern(span_of(dims, true) * from_size, 7);
  Bytes expected(span_of(dims, false) * to_size, std::byte{0x5a});
  Bytes found = expected;
  std::vector<std::uint64_t> index(dims.size(), 0);
  for (bool more = true; more;) {
    std::uint64_t a = 0;
    std::uint64_t b = 0;
    for (std::size_t d = 0; d < dims.size(); ++d) {
      a += index[d] * dims[d].source_stride;
      b += index[d] * dims[d].target_stride;
    }
    cast.run(from.data() + a * from_size, expected.data() + b * to_size, 1);
    std::size_t d = dims.size();
    while (d > 0 && ++index[d - 1] == dims[d - 1].extent) index[--d] = 0;
    more = d > 0;
  }
  copy_box(dims, cast, from.data(), from_size, found.data(), to_size);
  EXPECT_TRUE(found == expected);
}

TEST(CopyBoxTest, EveryOrderOfDimensions) {
  const std::array<std::uint64_t, 3> extents = {5, 67, 34};
  std::array<std::size_t, 3> order = {0, 1, 2};
  do {
    std::vector<BoxDim> dims(3);
    std::uint64_t stride = 1;
    for (std::size_t i = 3; i-- > 0;) {
      dims[i] = {.extent = extents[i], .target_stride = stride};
      stride *= extents[i];
    }
    stride = 1;
    for (const std::size_t i : order) {
      dims[i].source_stride = stride;
      stride *= extents[i] + 1;
    }
    compare(dims, Dtype::bf16, Dtype::bf16);
    compare(dims, Dtype::f64, Dtype::f64);
    compare(dims, Dtype::u8, Dtype::u8);
    compare(dims, Dtype::c128, Dtype::c128);
    compare(dims, Dtype::f32, Dtype::f16);
    std::ranges::reverse(dims);  // dims may come in any order
    compare(dims, Dtype::u8, Dtype::f64);
  } while (std::ranges::next_permutation(order).found);
}

// Includes element widths that have no optimised code.
TEST(CopyBoxTest, EveryWidthIsTransposed) {
  for (std::size_t i = 0; i < dtype_count; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    if (element_bytes(dtype) == 0) continue;
    SCOPED_TRACE(name(dtype));
    compare({{67, 1, 34}, {34, 67, 1}}, dtype, dtype);
    compare({{3, 3000, 2500}, {33, 1, 70}, {65, 40, 1}}, dtype, dtype);
    compare({{100, 3, 2}}, dtype, dtype);
  }
}

TEST(CopyBoxTest, SmallAndOddBoxes) {
  compare({}, Dtype::f32, Dtype::f64);
  compare({{1, 5, 9}}, Dtype::f32, Dtype::f32);
  compare({{100, 3, 2}}, Dtype::u8, Dtype::i64);
  compare({{100, 0, 1}}, Dtype::bf16, Dtype::f32);
  compare({{3, 0, 8}, {8, 1, 1}}, Dtype::u16, Dtype::u16);
  compare({{33, 1, 100}, {31, 40, 2}}, Dtype::f32, Dtype::f32);
  compare({{2, 100, 100}, {2, 50, 50}, {2, 25, 25}, {2, 1, 1}}, Dtype::u8, Dtype::u8);
}

TEST(CopyBoxTest, AnEmptyBoxCopiesNothing) {
  std::array<std::byte, 4> target = {};
  const std::array<BoxDim, 2> dims = {{{3, 1, 1}, {0, 1, 1}}};
  copy_box(dims, cast_between(Dtype::u8, Dtype::u8), nullptr, 1, target.data(), 1);
  EXPECT_EQ(target, (std::array<std::byte, 4>{}));
}

TEST(CopyBoxTest, DimensionsThatRunOnAreJoined) {
  BoxDims dims;
  for (const BoxDim& dim : {BoxDim{4, 30, 30}, BoxDim{1, 7, 7}, BoxDim{5, 6, 6}, BoxDim{6, 1, 1}}) {
    ASSERT_TRUE(dims.append(dim));
  }
  dims.sort_by_source();
  ASSERT_EQ(dims.dims().size(), 1u);
  EXPECT_EQ(dims.dims()[0], (BoxDim{120, 1, 1}));
}

TEST(CopyBoxTest, MoreDimensionsThanThereCanBeAreRefused) {
  BoxDims dims;
  for (std::size_t i = 0; i < box_rank_max; ++i) ASSERT_TRUE(dims.append({2, 1, 1}));
  EXPECT_TRUE(dims.append({1, 1, 1}));
  EXPECT_FALSE(dims.append({2, 1, 1}));
}

}  // namespace
}  // namespace loadstone
