// Compares views with plain loops over the elements.
#include "boxes/view.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "boxes/check_boxes.h"
#include "boxes/slice.h"
#include "support/plans.h"

namespace loadstone::test {
namespace {

// A view and its expected elements.
struct Pair {
  View view;
  Elements elements;
};

Pair source_pair(std::uint32_t source, const Shape& shape) {
  return {whole_view(source, shape), Elements::of_source(source, shape)};
}

void expect_equal(const Pair& pair) {
  ASSERT_EQ(pair.view.shape, pair.elements.shape);
  const Elements made = written(boxes_of(pair.view), pair.view.shape);
  ASSERT_EQ(made.ids, pair.elements.ids) << pair.view.shape.text();
}

TEST(View, WholeSourceIsOneRun) {
  const auto boxes = boxes_of(whole_view(3, {4, 5, 6}));
  ASSERT_EQ(boxes.size(), 1u);
  EXPECT_EQ(boxes[0], (Box{3, 0, 0, {{120, 1, 1}}}));
}

TEST(View, ScalarIsABoxOfOneElement) {
  const auto boxes = boxes_of(whole_view(0, {}));
  ASSERT_EQ(boxes.size(), 1u);
  EXPECT_TRUE(boxes[0].dims.empty());
}

TEST(View, EmptyTensorKeepsItsSource) {
  View view = whole_view(7, {3, 0, 2});
  ASSERT_FALSE(reshape(view, {0, 5}));
  ASSERT_FALSE(transpose(view, 0, 1));
  const auto boxes = boxes_of(view);
  ASSERT_EQ(boxes.size(), 1u);
  EXPECT_EQ(boxes[0].source, 7u);
  EXPECT_EQ(volume(boxes[0]), 0u);
}

TEST(View, EmptyPartOfAConcatLeavesNoBox) {
  View joined;
  ASSERT_FALSE(concat({whole_view(0, {0, 4}), whole_view(1, {2, 4})}, 0, joined));
  const auto boxes = boxes_of(joined);
  ASSERT_EQ(boxes.size(), 1u);
  EXPECT_EQ(boxes[0].source, 1u);
}

TEST(View, TransposeIsOneBox) {
  Pair pair = source_pair(0, {4, 6});
  ASSERT_FALSE(transpose(pair.view, 0, -1));
  pair.elements = pair.elements.permuted({1, 0});
  expect_equal(pair);
  EXPECT_EQ(boxes_of(pair.view).size(), 1u);
}

TEST(View, RotaryInterleaveIsOneBox) {
  // The view interleaves the two halves of each head of a [heads * 2 * half, in] matrix.
  Pair pair = source_pair(0, {4 * 2 * 3, 5});
  ASSERT_FALSE(reshape(pair.view, {4, 2, 3, 5}));
  ASSERT_FALSE(transpose(pair.view, 1, 2));
  ASSERT_FALSE(reshape(pair.view, {24, 5}));
  pair.elements = pair.elements.reshaped({4, 2, 3, 5}).permuted({0, 2, 1, 3}).reshaped({24, 5});
  expect_equal(pair);
  EXPECT_EQ(boxes_of(pair.view).size(), 1u);
}

TEST(View, SliceOfAnInterleavedDimension) {
  for (std::uint64_t start = 0; start < 24; ++start) {
    for (std::uint64_t size = 1; start + size <= 24; ++size) {
      Pair pair = source_pair(0, {4 * 2 * 3, 2});
      ASSERT_FALSE(reshape(pair.view, {4, 2, 3, 2}));
      ASSERT_FALSE(transpose(pair.view, 1, 2));
      ASSERT_FALSE(reshape(pair.view, {24, 2}));
      ASSERT_FALSE(slice(pair.view, 0, start, size));
      pair.elements = pair.elements.reshaped({4, 2, 3, 2})
                          .permuted({0, 2, 1, 3})
                          .reshaped({24, 2})
                          .sliced(0, start, size);
      expect_equal(pair);
    }
  }
}

TEST(View, ReshapeAgainstTheGrainStillHoldsEachElement) {
  Pair pair = source_pair(0, {6, 4});
  ASSERT_FALSE(transpose(pair.view, 0, 1));
  ASSERT_FALSE(reshape(pair.view, {3, 8}));
  ASSERT_FALSE(transpose(pair.view, 0, 1));
  ASSERT_FALSE(reshape(pair.view, {12, 2}));
  pair.elements =
      pair.elements.permuted({1, 0}).reshaped({3, 8}).permuted({1, 0}).reshaped({12, 2});
  expect_equal(pair);
}

TEST(View, MisfitsAreSaid) {
  View view = whole_view(0, {2, 3});
  EXPECT_TRUE(transpose(view, 0, 2));
  EXPECT_TRUE(permute(view, {0}));
  EXPECT_TRUE(permute(view, {0, 0}));
  EXPECT_TRUE(permute(view, {0, -3}));
  EXPECT_TRUE(slice(view, 1, 1, 3));
  EXPECT_TRUE(slice(view, 1, UINT64_MAX, 2));
  EXPECT_TRUE(slice(view, 2, 0, 1));
  EXPECT_TRUE(reshape(view, {7}));
  EXPECT_TRUE(reshape(view, {UINT64_MAX, 6}));
  View result;
  EXPECT_TRUE(concat({whole_view(0, {2, 3}), whole_view(1, {3, 2})}, 0, result));
  EXPECT_TRUE(concat({whole_view(0, {2, 3}), whole_view(1, {2})}, 0, result));
  EXPECT_TRUE(stack({whole_view(0, {2, 3}), whole_view(1, {2, 4})}, 0, result));
  EXPECT_TRUE(stack({whole_view(0, {2, 3})}, 3, result));
  EXPECT_TRUE(stack({}, 0, result));
  const std::uint64_t half = std::uint64_t{1} << 63;
  EXPECT_TRUE(concat({whole_view(0, {half}), whole_view(1, {half})}, 0, result));
}

// ---- random chains of operations

class Chain {
 public:
  explicit Chain(unsigned seed) : random_(seed) {}

  Slice some_slice(const Shape& whole) {
    Slice slice;
    std::vector<std::uint64_t> extents;
    for (const std::uint64_t extent : whole.extents()) {
      slice.begin.push_back(below(2) == 0 ? 0 : below(extent + 1));
      const std::uint64_t rest = extent - slice.begin.back();
      extents.push_back(below(2) == 0 ? rest : below(rest + 1));
    }
    slice.shape = Shape(extents);
    return slice;
  }

  // Divides each dimension into equal groups, and returns a slice with the same range of each.
  Slice some_slice_of_groups(const Shape& whole) {
    Slice slice;
    std::vector<std::uint64_t> extents;
    for (const std::uint64_t extent : whole.extents()) {
      std::vector<std::uint64_t> counts;
      for (std::uint64_t count = 1; count <= 6; ++count) {
        if (extent % count == 0) counts.push_back(count);
      }
      const std::uint64_t count = counts[below(counts.size())];
      const std::uint64_t group = extent / count;
      slice.groups.push_back(count);
      slice.begin.push_back(below(group + 1));
      extents.push_back(count * below(group - slice.begin.back() + 1));
    }
    slice.shape = Shape(extents);
    return slice;
  }

  Pair run() {
    Pair pair = make();
    const unsigned steps = below(6);
    for (unsigned i = 0; i < steps; ++i) step(pair);
    return pair;
  }

 private:
  unsigned below(std::uint64_t bound) {
    return static_cast<unsigned>(
        std::uniform_int_distribution<std::uint64_t>(0, bound - 1)(random_));
  }

  Shape some_shape() {
    std::vector<std::uint64_t> extents;
    for (unsigned i = below(4); i > 0; --i) extents.push_back(1 + below(6));
    return Shape(extents);
  }

  Pair make() {
    const Shape shape = some_shape();
    if (below(3) == 0) return source_pair(next_source_++, shape);
    std::vector<View> views;
    std::vector<Elements> parts;
    for (unsigned i = 1 + below(3); i > 0; --i) {
      Pair part = source_pair(next_source_++, shape);
      views.push_back(std::move(part.view));
      parts.push_back(std::move(part.elements));
    }
    Pair pair;
    const std::size_t rank = shape.rank();
    if (rank == 0 || below(2) == 0) {
      const std::size_t dim = below(rank + 1);
      EXPECT_FALSE(stack(std::move(views), signed_dim(dim, rank + 1), pair.view));
      pair.elements = Elements::stack(parts, dim);
    } else {
      const std::size_t dim = below(rank);
      EXPECT_FALSE(concat(std::move(views), signed_dim(dim, rank), pair.view));
      pair.elements = Elements::concat(parts, dim);
    }
    return pair;
  }

  std::int64_t signed_dim(std::size_t dim, std::size_t rank) {
    const auto index = static_cast<std::int64_t>(dim);
    return below(2) == 0 ? index : index - static_cast<std::int64_t>(rank);
  }

  void step(Pair& pair) {
    const std::size_t rank = pair.view.shape.rank();
    const unsigned kind = below(4);
    if (kind == 0) {
      reshape_randomly(pair);
    } else if (kind == 1) {
      std::vector<std::size_t> order(rank);
      std::iota(order.begin(), order.end(), 0);
      std::ranges::shuffle(order, random_);
      std::vector<std::int64_t> dims;
      for (const std::size_t dim : order) dims.push_back(signed_dim(dim, rank));
      EXPECT_FALSE(permute(pair.view, dims));
      pair.elements = pair.elements.permuted(order);
    } else if (kind == 2 && rank > 0) {
      const std::size_t dim = below(rank);
      const std::uint64_t start = below(pair.view.shape[dim]);
      const std::uint64_t size = 1 + below(pair.view.shape[dim] - start);
      EXPECT_FALSE(slice(pair.view, signed_dim(dim, rank), start, size));
      pair.elements = pair.elements.sliced(dim, start, size);
    } else if (rank > 0) {
      const std::size_t dim = below(rank);
      Pair other = source_pair(next_source_++, pair.view.shape);
      std::vector<View> views = {std::move(pair.view), std::move(other.view)};
      View joined;
      EXPECT_FALSE(concat(std::move(views), signed_dim(dim, rank), joined));
      pair.view = std::move(joined);
      pair.elements = Elements::concat({pair.elements, other.elements}, dim);
    }
  }

  void reshape_randomly(Pair& pair) {
    std::uint64_t rest = pair.view.shape.numel().value();
    std::vector<std::uint64_t> extents;
    for (std::uint64_t factor = 2; factor <= rest;) {
      if (rest % factor != 0) {
        ++factor;
        continue;
      }
      rest /= factor;
      if (extents.empty() || below(2) == 0) {
        extents.push_back(factor);
      } else {
        extents[below(extents.size())] *= factor;
      }
    }
    if (below(3) == 0) extents.insert(extents.begin() + below(extents.size() + 1), 1);
    std::ranges::shuffle(extents, random_);
    const Shape shape(extents);
    EXPECT_FALSE(reshape(pair.view, shape));
    pair.elements = pair.elements.reshaped(shape);
  }

  std::mt19937 random_;
  std::uint32_t next_source_ = 0;
};

TEST(View, RandomChainsMoveEachElementToItsPlace) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    const Pair pair = Chain(seed).run();
    expect_equal(pair);
    if (testing::Test::HasFatalFailure()) return;
    // The plan's check of boxes must accept these views too.
    const auto boxes = boxes_of(pair.view);
    std::vector<TensorInfo> sources(16);
    for (TensorInfo& source : sources) source.shape = Shape{1u << 30};
    const auto defect = check_boxes(boxes, pair.view.shape.numel().value(), sources);
    ASSERT_FALSE(defect) << defect->message;
  }
}

TEST(SliceBoxes, WriteOfAnySliceWhatTheWholeHasThere) {
  for (unsigned seed = 0; seed < 4000; ++seed) {
    SCOPED_TRACE(seed);
    Chain chain(seed);
    Pair pair = chain.run();
    const Shape whole = pair.view.shape;
    const Slice slice = chain.some_slice(whole);
    std::vector<Box> boxes = boxes_of(pair.view);
    for (Box& box : boxes) box.decoding = box.source % 2;
    ASSERT_FALSE(slice_boxes(boxes, whole, slice));
    for (std::size_t dim = 0; dim < whole.rank(); ++dim) {
      pair.elements = pair.elements.sliced(dim, slice.begin[dim], slice.shape[dim]);
    }
    for (const Box& box : boxes) ASSERT_EQ(box.decoding, box.source % 2);
    ASSERT_EQ(written(boxes, slice.shape).ids, pair.elements.ids) << slice.text();
    std::vector<TensorInfo> sources(16);
    for (TensorInfo& source : sources) source.shape = Shape{1u << 30};
    for (Box& box : boxes) box.decoding = no_decoding;
    const auto defect = check_boxes(boxes, slice.shape.numel().value(), sources);
    ASSERT_FALSE(defect) << defect->message;
  }
}

TEST(SliceBoxes, TakeTheSameOfEachGroup) {
  for (unsigned seed = 0; seed < 2000; ++seed) {
    SCOPED_TRACE(seed);
    Chain chain(seed);
    Pair pair = chain.run();
    const Shape whole = pair.view.shape;
    const Slice slice = chain.some_slice_of_groups(whole);
    ASSERT_TRUE(slice.is_inside(whole)) << slice.text();
    std::vector<Box> boxes = boxes_of(pair.view);
    ASSERT_FALSE(slice_boxes(boxes, whole, slice));
    Elements expected = pair.elements;
    for (std::size_t dim = 0; dim < whole.rank(); ++dim) {
      const std::uint64_t group = whole[dim] / slice.groups[dim];
      std::vector<Elements> parts;
      for (std::uint64_t i = 0; i < slice.groups[dim]; ++i) {
        parts.push_back(expected.sliced(dim, i * group + slice.begin[dim],
                                        slice.shape[dim] / slice.groups[dim]));
      }
      expected = Elements::concat(parts, dim);
    }
    ASSERT_EQ(written(boxes, slice.shape).ids, expected.ids) << slice.text();
  }
}

TEST(SliceBoxes, RowsAndColumnsAreOneBox) {
  std::vector<Box> rows = boxes_of(whole_view(0, {64, 32}));
  ASSERT_FALSE(slice_boxes(rows, {64, 32}, {{16, 0}, {16, 32}}));
  EXPECT_THAT(rows, testing::ElementsAre(Box{0, 512, 0, {{512, 1, 1}}}));
  std::vector<Box> columns = boxes_of(whole_view(0, {64, 32}));
  ASSERT_FALSE(slice_boxes(columns, {64, 32}, {{0, 8}, {64, 8}}));
  EXPECT_THAT(columns, testing::ElementsAre(Box{0, 8, 0, {{64, 32, 8}, {8, 1, 1}}}));
}

}  // namespace
}  // namespace loadstone::test
