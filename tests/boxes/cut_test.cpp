// Compares cut and joined boxes with the elements that the original boxes write.
#include "boxes/cut.h"

#include <gmock/gmock.h>

#include "boxes/dims.h"
#include "boxes/direct_read.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

TEST(CutBox, KeepsWhatLiesInsideWhereverItIsCut) {
  // A [4, 3, 5] box whose elements are written in a different order than they are read.
  Box box = {.source = 0, .dims = {{3, 5, 5}, {5, 1, 1}, {4, 15, 15}}};
  ASSERT_TRUE(order_to_cut(box));
  const Elements whole = written({box}, {60});
  for (std::uint64_t begin = 0; begin <= 60; ++begin) {
    for (std::uint64_t end = begin + 1; end <= 60; ++end) {
      std::vector<Box> parts;
      cut_box(box, begin, end, parts);
      const Elements part = written(parts, {end - begin});
      ASSERT_EQ(part.ids, whole.sliced(0, begin, end - begin).ids) << begin << " to " << end;
    }
  }
}

// Views produce only dimensions that nest, but a plan may contain any dimensions.
TEST(CutBox, CutsAtAnyElementOfDimensionsThatDoNotNest) {
  const Box box = {.source = 0, .target_offset = 3, .dims = {{2, 10, 3}, {3, 1, 2}}};
  for (std::uint64_t begin = 0; begin < 14; ++begin) {
    for (std::uint64_t end = begin; end < 14; ++end) {
      std::vector<std::pair<std::uint64_t, std::uint64_t>> expected;
      for (std::uint64_t i = 0; i < 2; ++i) {
        for (std::uint64_t j = 0; j < 3; ++j) {
          const std::uint64_t target = 3 + 3 * i + 2 * j;
          if (begin <= target && target < end) expected.emplace_back(target - begin, 10 * i + j);
        }
      }
      std::vector<Box> cut;
      cut_box(box, begin, end, cut);
      std::vector<std::pair<std::uint64_t, std::uint64_t>> found;
      for (const Box& part : cut) {
        const BoxDim one = {};
        const BoxDim& outer = part.dims.size() > 1 ? part.dims[0] : one;
        const BoxDim& inner = part.dims.empty() ? one : part.dims.back();
        for (std::uint64_t i = 0; i < outer.extent; ++i) {
          for (std::uint64_t j = 0; j < inner.extent; ++j) {
            found.emplace_back(
                part.target_offset + i * outer.target_stride + j * inner.target_stride,
                part.source_offset + i * outer.source_stride + j * inner.source_stride);
          }
        }
      }
      EXPECT_THAT(found, ::testing::UnorderedElementsAreArray(expected)) << begin << " " << end;
    }
  }
}

TEST(CutBox, RefusesBoxesThatWriteTwiceAndStopsAtALimit) {
  Box twice = {.source = 0, .dims = {{3, 1, 0}}};
  EXPECT_FALSE(order_to_cut(twice));
  Box comb = {.source = 0, .dims = {{100, 2, 2}, {100, 7, 3}}};
  ASSERT_TRUE(order_to_cut(comb));
  std::vector<Box> parts;
  cut_box(comb, 1, 250, parts, 10);
  EXPECT_EQ(parts.size(), 11u);
}

TEST(BoxDims, JoinsNeighboursThatRunOnAsTheListDoes) {
  const std::vector<BoxDim> dims = {{4, 1, 1}, {5, 12, 12}, {1, 9, 9}, {3, 4, 4}};
  std::vector<BoxDim> joined = dims;
  normalise(joined);
  EXPECT_THAT(joined, testing::ElementsAre(BoxDim{60, 1, 1}));
  BoxDims same;
  for (const BoxDim& dim : dims) ASSERT_TRUE(same.append(dim));
  same.sort_by_target();
  EXPECT_THAT(same.dims(), testing::ElementsAreArray(joined));
  // Products that overflow must not look joinable.
  std::vector<BoxDim> huge = {{UINT64_MAX, 4, 4}, {UINT64_C(1) << 62, 4, 4}};
  normalise(huge);
  EXPECT_EQ(huge.size(), 2u);
}

TEST(ReadsDirectly, OneRunOrLongOnes) {
  const std::vector<BoxDim> one = {{16, 1, 1}};
  const std::vector<BoxDim> longer = {{3, 5000, 4096}, {4096, 1, 1}};
  const std::vector<BoxDim> shorter = {{3, 5000, 1024}, {1024, 1, 1}};
  const std::vector<BoxDim> turned = {{3, 1, 4}, {4, 3, 1}};
  EXPECT_TRUE(reads_directly({}, 4));
  EXPECT_TRUE(reads_directly(one, 4));
  EXPECT_TRUE(reads_directly(longer, 1));
  EXPECT_FALSE(reads_directly(shorter, 1));
  EXPECT_TRUE(reads_directly(shorter, 4));
  EXPECT_FALSE(reads_directly(turned, 4));
}

}  // namespace
}  // namespace loadstone::test
