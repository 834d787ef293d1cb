// Compares the check of boxes with a bitmap of the written elements.
#include "boxes/check_boxes.h"

#include <gmock/gmock.h>

#include <functional>
#include <random>

#include "support/plans.h"

namespace loadstone::test {
namespace {

std::vector<TensorInfo> sources_of(std::vector<Shape> shapes) {
  std::vector<TensorInfo> sources;
  for (Shape& shape : shapes) sources.emplace_back().shape = std::move(shape);
  return sources;
}

bool passes(const std::vector<Box>& boxes, std::uint64_t elements, std::uint64_t source = 1000) {
  return !check_boxes(boxes, elements, sources_of({Shape{source}}));
}

TEST(CheckBoxes, PassesRunsThatMeet) {
  EXPECT_TRUE(passes({{0, 0, 0, {{6, 1, 1}}}, {0, 6, 6, {{4, 1, 1}}}}, 10));
}

TEST(CheckBoxes, RefusesOverlapWithAHoleOfTheSameSize) {
  EXPECT_FALSE(passes({{0, 0, 0, {{6, 1, 1}}}, {0, 6, 5, {{4, 1, 1}}}}, 10));
  // Both boxes write column 0 of a [5, 2] target, and none writes column 1.
  EXPECT_FALSE(passes({{0, 0, 0, {{5, 1, 2}}}, {0, 5, 0, {{5, 1, 2}}}}, 10));
  EXPECT_TRUE(passes({{0, 0, 0, {{5, 1, 2}}}, {0, 5, 1, {{5, 1, 2}}}}, 10));
}

TEST(CheckBoxes, RefusesOneElementOutside) {
  EXPECT_TRUE(passes({{0, 990, 0, {{10, 1, 1}}}}, 10));
  EXPECT_FALSE(passes({{0, 991, 0, {{10, 1, 1}}}}, 10));
  EXPECT_FALSE(passes({{0, 0, 1, {{10, 1, 1}}}}, 10));
  EXPECT_FALSE(passes({{0, 0, 0, {{11, 1, 1}}}}, 10));
  EXPECT_FALSE(passes({{0, 0, 0, {{9, 1, 1}}}}, 10));
}

TEST(CheckBoxes, RefusesNumbersThatWrapAround) {
  const std::uint64_t huge = UINT64_MAX;
  EXPECT_FALSE(passes({{0, 0, huge, {{2, 1, 1}}}, {0, 0, 1, {{9, 1, 1}}}}, 10));
  EXPECT_FALSE(passes({{0, huge - 3, 0, {{10, 1, 1}}}}, 10));
  EXPECT_FALSE(passes({{0, 0, 0, {{10, huge / 9 + 1, 1}}}}, 10));
  EXPECT_FALSE(passes({{0, 0, 0, {{huge, 1, 1}}}}, 10));
  EXPECT_FALSE(passes({{0, 0, 0, {{huge, 0, 0}, {huge, 0, 0}, {10, 1, 1}}}}, 10));
  EXPECT_FALSE(passes({{0, 0, 0, {{1ull << 32, 0, 0}, {1ull << 32, 0, 0}}}}, 0));
  EXPECT_FALSE(passes({{1, 0, 0, {{10, 1, 1}}}}, 10));
  EXPECT_FALSE(passes({{0, 0, 0, std::vector<BoxDim>(65, {1, 1, 1})}}, 1));
}

TEST(CheckBoxes, ASourceMayBeReadTwice) {
  EXPECT_TRUE(passes({{0, 0, 0, {{10, 0, 1}}}}, 10));
  EXPECT_FALSE(passes({{0, 0, 0, {{10, 1, 0}}}}, 10));
}

TEST(CheckBoxes, EmptyTargets) {
  EXPECT_FALSE(passes({}, 0));  // an empty target still needs a source
  EXPECT_TRUE(passes({{0, 0, 0, {{0, 1, 1}}}}, 0));
  EXPECT_FALSE(passes({{0, 0, 0, {{0, 1, 1}}}}, 1));
  EXPECT_FALSE(passes({}, 1));
}

TEST(CheckBoxes, LargeTargetsWithoutABitmap) {
  // A bitmap of a [2^26, 4096] target would take 32 GiB.
  const std::uint64_t rows = 1u << 26;
  std::vector<Box> boxes;
  for (std::uint64_t c = 0; c < 4096; ++c) boxes.push_back({0, 0, c, {{rows, 0, 4096}}});
  EXPECT_TRUE(passes(boxes, rows * 4096));
  boxes[7].target_offset = 8;
  EXPECT_FALSE(passes(boxes, rows * 4096));
}

TEST(CheckBoxes, StepsThatDoNotNestAreStillExact) {
  // The box writes 2 * {0..2} + 3 * {0, 1}, which is 0 2 4 3 5 7. Elements 1 and 6 remain.
  const Box odd = {0, 0, 0, {{2, 1, 3}, {3, 1, 2}}};
  EXPECT_TRUE(passes({odd, {0, 0, 1, {}}, {0, 0, 6, {}}}, 8));
  EXPECT_FALSE(passes({odd, {0, 0, 1, {}}, {0, 0, 7, {}}}, 8));
}

TEST(CheckBoxes, DeepNestsDoNotTakeTheStack) {
  std::vector<Box> boxes;
  std::uint64_t total = 0;
  for (std::uint64_t k = 5000; k > 2; --k) {
    boxes.push_back({0, 0, 0, {{2, 0, k}}});
    total += 2;
  }
  EXPECT_FALSE(passes(boxes, total));
}

// Checks random boxes: valid ones cut from a grid, and invalid ones with one changed value.
TEST(CheckBoxes, AgreesWithPaintingOnRandomBoxes) {
  std::mt19937 random(5);
  const auto below = [&](std::uint64_t bound) {
    return std::uniform_int_distribution<std::uint64_t>(0, bound - 1)(random);
  };
  std::size_t right = 0;
  std::size_t wrong = 0;
  for (int round = 0; round < 20000; ++round) {
    // Cuts a tensor repeatedly along random dimensions. The pieces become the boxes.
    std::vector<std::uint64_t> extents;
    for (std::uint64_t i = 1 + below(3); i > 0; --i) extents.push_back(1 + below(6));
    std::vector<Box> boxes;
    const Shape shape(extents);
    std::vector<std::pair<std::vector<std::uint64_t>, std::vector<std::uint64_t>>> ranges = {
        {std::vector<std::uint64_t>(extents.size(), 0), extents}};
    for (std::uint64_t i = below(6); i > 0; --i) {
      const std::size_t which = below(ranges.size());
      const std::size_t dim = below(extents.size());
      auto& [begin, size] = ranges[which];
      if (size[dim] < 2) continue;
      auto other = ranges[which];
      const std::uint64_t at = 1 + below(size[dim] - 1);
      ranges[which].second[dim] = at;
      other.first[dim] += at;
      other.second[dim] -= at;
      ranges.push_back(other);
    }
    for (const auto& [begin, size] : ranges) {
      Box box;
      std::uint64_t stride = 1;
      for (std::size_t d = extents.size(); d-- > 0;) {
        box.target_offset += begin[d] * stride;
        box.dims.insert(box.dims.begin(), {size[d], 0, stride});
        stride *= extents[d];
      }
      boxes.push_back(box);
    }
    if (below(3) != 0) {
      Box& box = boxes[below(boxes.size())];
      const std::uint64_t kind = below(3);
      BoxDim& dim = box.dims[below(box.dims.size())];
      if (kind == 0) box.target_offset = below(shape.numel().value() + 1);
      if (kind == 1) dim.target_stride = below(8);
      if (kind == 2) dim.extent = 1 + below(4);
    }
    const std::uint64_t elements = shape.numel().value();
    std::vector<unsigned> painted(elements, 0);
    bool is_right = true;
    for (const Box& box : boxes) {
      const std::function<void(std::size_t, std::uint64_t)> paint = [&](std::size_t d,
                                                                        std::uint64_t at) {
        if (d == box.dims.size()) {
          if (at >= elements || ++painted[at] > 1) is_right = false;
          return;
        }
        for (std::uint64_t i = 0; i < box.dims[d].extent; ++i) {
          paint(d + 1, at + i * box.dims[d].target_stride);
        }
      };
      paint(0, box.target_offset);
    }
    for (const unsigned count : painted) is_right = is_right && count == 1;
    ASSERT_EQ(passes(boxes, elements), is_right) << round;
    ++(is_right ? right : wrong);
  }
  EXPECT_GT(right, 3000u);
  EXPECT_GT(wrong, 3000u);
}

TEST(WholeBytes, RunsThatEndBetweenBytes) {
  EXPECT_TRUE(moves_whole_bytes({0, 2, 4, {{6, 1, 1}}}, 4));
  EXPECT_FALSE(moves_whole_bytes({0, 1, 4, {{6, 1, 1}}}, 4));
  EXPECT_FALSE(moves_whole_bytes({0, 2, 4, {{5, 1, 1}}}, 4));
  EXPECT_FALSE(moves_whole_bytes({0, 0, 0, {{2, 2, 1}}}, 4));
  EXPECT_TRUE(moves_whole_bytes({0, 4, 0, {{8, 1, 1}}}, 6));
  EXPECT_FALSE(moves_whole_bytes({0, 2, 0, {{8, 1, 1}}}, 6));
  EXPECT_TRUE(moves_whole_bytes({0, 1, 3, {{5, 2, 1}}}, 16));
}

}  // namespace
}  // namespace loadstone::test
