// Tests the prediction whether values survive a change of encoding.
#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "boxes/block_boxes.h"
#include "codec/block_grid.h"

namespace loadstone::test {
namespace {

using Position = std::pair<std::uint64_t, std::uint64_t>;  // matrix, and block in the matrix

// Returns the block of an element of a stack of matrices.
Position block_of(std::uint64_t element, const Shape& shape, const BlockGrid& grid) {
  const std::uint64_t columns = shape[shape.rank() - 1];
  const std::uint64_t rows = shape[shape.rank() - 2];
  const std::uint64_t in_matrix = element % (rows * columns);
  if (grid.is_flat) return {element / (rows * columns), in_matrix / grid.columns};
  const std::uint64_t per_row = (columns - 1) / grid.columns + 1;
  return {element / (rows * columns),
          in_matrix / columns / grid.rows * per_row + in_matrix % columns / grid.columns};
}

// Calls visit(source element, target element) for each element of a box.
template <class Visit>
void visit_elements(const Box& box, Visit visit, std::size_t dim = 0, std::uint64_t source = 0,
                    std::uint64_t target = 0) {
  if (dim == box.dims.size()) return visit(box.source_offset + source, box.target_offset + target);
  for (std::uint64_t i = 0; i < box.dims[dim].extent; ++i) {
    visit_elements(box, visit, dim + 1, source + i * box.dims[dim].source_stride,
                   target + i * box.dims[dim].target_stride);
  }
}

// Returns true if no block of the target has elements of two blocks of the source, or is only
// partly in the box.
bool is_within(const Box& box, const Shape& source, const BlockGrid& from, const Shape& target,
               const BlockGrid& to) {
  std::map<Position, std::set<Position>> sources;
  std::map<Position, std::uint64_t> counts;
  visit_elements(box, [&](std::uint64_t at, std::uint64_t made) {
    const Position block = block_of(made, target, to);
    sources[block].insert(block_of(at, source, from));
    ++counts[block];
  });
  std::map<Position, std::uint64_t> whole;
  for (std::uint64_t i = 0; i < target.numel(); ++i) ++whole[block_of(i, target, to)];
  return std::ranges::all_of(sources, [&](const auto& each) {
    return each.second.size() == 1 && counts[each.first] == whole[each.first];
  });
}

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  std::uint64_t operator()(std::uint64_t least, std::uint64_t most) {
    return std::uniform_int_distribution<std::uint64_t>(least, most)(engine_);
  }

 private:
  std::mt19937_64 engine_;
};

BlockGrid random_grid(Random& random) {
  constexpr std::array<std::uint64_t, 6> extents = {1, 2, 4, 8, 32, UINT64_MAX};
  BlockGrid grid;
  grid.rows = extents[random(0, 5)];
  grid.columns = extents[random(0, 5)];
  if (random(0, 5) == 0) {
    grid = {.columns = extents[random(0, 4)], .is_flat = true};
  }
  return grid;
}

struct Case {
  Shape source;
  Shape target;
  Box box;
};

// Returns a slice, groups of rows, a transposition or a part of a larger target, of a stack of
// matrices.
Case random_case(Random& random) {
  const std::uint64_t stack = random(1, 3);
  const std::uint64_t rows = random(1, 3) * (random(0, 1) == 0 ? 4 : 3);
  const std::uint64_t columns = random(1, 3) * (random(0, 2) == 0 ? 3 : 8);
  const std::uint64_t row = random(0, 1) == 0 ? 0 : random(0, rows - 1);
  const std::uint64_t column = random(0, 1) == 0 ? 0 : random(0, columns - 1);
  const std::uint64_t step = random(0, 3) == 0 ? 2 : 1;  // takes every second row
  const std::uint64_t height = (random(1, rows - row) + step - 1) / step;
  const std::uint64_t width = random(0, 1) == 0 ? columns - column : random(1, columns - column);
  const bool is_transposed = random(0, 2) == 0;
  const std::uint64_t made_rows = (is_transposed ? width : height) + random(0, 1) * 4;
  const std::uint64_t made_columns = (is_transposed ? height : width) + random(0, 1) * 8;
  const std::uint64_t at_row = made_rows - (is_transposed ? width : height);
  const std::uint64_t at_column = made_columns - (is_transposed ? height : width);
  Case made = {.source = {stack, rows, columns}, .target = {stack, made_rows, made_columns}};
  made.box.source_offset = row * columns + column;
  made.box.target_offset = at_row * made_columns + at_column;
  const BoxDim down = {height, step * columns, is_transposed ? 1 : made_columns};
  const BoxDim along = {width, 1, is_transposed ? made_columns : 1};
  made.box.dims = {{stack, rows * columns, made_rows * made_columns}};
  made.box.dims.push_back(is_transposed ? along : down);
  made.box.dims.push_back(is_transposed ? down : along);
  if (is_transposed && width % 2 == 0 &&
      random(0, 1) == 0) {  // the halves of the columns alternate
    made.box.dims[1] = {2, width / 2, made_columns};
    made.box.dims.push_back({width / 2, 1, 2 * made_columns});
  }
  if (!is_transposed && made_columns == columns && width == columns && step == 1) {
    made.box.dims = {{stack, rows * columns, made_rows * made_columns}, {height * width, 1, 1}};
  } else if (!is_transposed && step == 1 && height > 2 && random(0, 1) == 0) {
    // Groups of rows, with a row between them in the source.
    const std::uint64_t group = random(1, (height - 1) / 2);
    const std::uint64_t groups = (height + 1) / (group + 1);
    made.box.dims = {{stack, rows * columns, made_rows * made_columns},
                     {groups, (group + 1) * columns, group * made_columns},
                     {group, columns, made_columns},
                     {width, 1, 1}};
  }
  return made;
}

// GPTQ stores matrices transposed, and llama.cpp's converter permutes the rows of attention heads.
TEST(BlocksAreWithin, RecognisesPermutedRowsOfATransposedMatrix) {
  const Shape source = {64, 16};
  const Shape target = {16, 64};
  const BlockGrid groups = {.rows = 32, .columns = 1};
  const Box box = {.dims = {{2, 8, 8 * 64}, {2, 4, 64}, {4, 1, 2 * 64}, {64, 16, 1}}};
  EXPECT_TRUE(blocks_are_within(box, source, groups, target, {.columns = 32}));
  EXPECT_FALSE(blocks_are_within(box, source, groups, target, {.columns = 64}));
  EXPECT_FALSE(blocks_are_within(box, source, groups, target, {.rows = 2, .columns = 32}));
}

TEST(BlocksAreWithin, AgreesWithEveryElement) {
  Random random(7);
  int within = 0;
  int cautious = 0;
  for (int i = 0; i < 20000; ++i) {
    const Case made = random_case(random);
    const BlockGrid from = random_grid(random);
    const BlockGrid to = random_grid(random);
    const bool expected = is_within(made.box, made.source, from, made.target, to);
    const bool found = blocks_are_within(made.box, made.source, from, made.target, to);
    ASSERT_TRUE(expected || !found)
        << made.source.text() << " at " << made.box.source_offset << " in blocks of " << from.rows
        << " x " << from.columns << ", to " << made.target.text() << " at "
        << made.box.target_offset << " in blocks of " << to.rows << " x " << to.columns;
    within += found ? 1 : 0;
    cautious += expected && !found ? 1 : 0;
  }
  EXPECT_GT(within, 2000);
  EXPECT_LT(cautious, within);
}

TEST(ContainsCodes, OfPairs) {
  const BlockGrid e2m1 = {.codes = e2m1_codes};
  const BlockGrid e4m3 = {.codes = float_codes(Dtype::f8_e4m3)};
  const BlockGrid int4 = {.codes = integer_codes(-8, 7)};
  const BlockGrid int8 = {.codes = integer_codes(-128, 127)};
  const BlockGrid signs = {.codes = integer_codes(-1, 1)};
  const BlockGrid shifted = {.codes = integer_codes(0, 15), .has_minimum = true};
  for (const BlockGrid& each : {e2m1, e4m3, int4, int8, signs, shifted}) {
    EXPECT_TRUE(contains_codes(each, each));
    EXPECT_TRUE(contains_codes(each, signs));
  }
  EXPECT_TRUE(contains_codes(e4m3, e2m1));
  EXPECT_TRUE(contains_codes(e4m3, int4));
  EXPECT_TRUE(contains_codes(int8, e2m1));
  EXPECT_TRUE(contains_codes(int8, int4));
  EXPECT_TRUE(contains_codes(shifted, int4));
  EXPECT_FALSE(contains_codes(int4, e2m1));
  EXPECT_FALSE(contains_codes(e2m1, int4));
  EXPECT_FALSE(contains_codes(e4m3, int8));
  EXPECT_FALSE(contains_codes(int8, e4m3));
  EXPECT_FALSE(contains_codes(int4, int8));
  EXPECT_FALSE(contains_codes(shifted, e2m1));
  EXPECT_FALSE(contains_codes(int8, shifted));
  EXPECT_FALSE(contains_codes({}, int4));
  EXPECT_FALSE(contains_codes(int4, {}));
}

TEST(HasHeadroom, OfPairs) {
  const BlockGrid e2m1 = {.codes = e2m1_codes};
  const BlockGrid e4m3 = {.codes = float_codes(Dtype::f8_e4m3)};
  const BlockGrid int5 = {.codes = integer_codes(-16, 15)};
  const BlockGrid int8 = {.codes = integer_codes(-128, 127)};
  for (const BlockGrid& each : {e4m3, int8}) EXPECT_TRUE(has_headroom(each, e2m1));
  EXPECT_TRUE(has_headroom(e4m3, e4m3));
  for (const BlockGrid& each : {e2m1, int5}) EXPECT_FALSE(has_headroom(each, e2m1));
  EXPECT_FALSE(has_headroom(int8, int8));
}

TEST(FidelityOfScales, OfPairs) {
  const auto grid = [](Dtype scale) { return BlockGrid{.scale = scale}; };
  struct Row {
    Dtype from;
    Dtype to;
    Fidelity within;
    Fidelity across;
  };
  using enum Fidelity;
  for (const Row& row : std::vector<Row>{
           {Dtype::f16, Dtype::f32, exact, lossy},
           {Dtype::f8_e4m3, Dtype::f32, exact, lossy},
           {Dtype::f16, Dtype::f16, exact, lossy},
           {Dtype::bf16, Dtype::f16, exact_where_scales_fit, lossy},
           {Dtype::f32, Dtype::f8_e8m0, lossy, lossy},
           {Dtype::f32, Dtype::f8_e4m3, lossy, lossy},
           {Dtype::f8_e8m0, Dtype::f8_e8m0, exact, exact_where_scales_fit},
           {Dtype::f8_e8m0, Dtype::f8_e4m3, exact_where_scales_fit, exact_where_scales_fit},
           {Dtype::f8_e8m0, Dtype::f32, exact, exact_where_scales_fit},
       }) {
    EXPECT_EQ(fidelity_of_scales(grid(row.from), grid(row.to), true, false), row.within);
    EXPECT_EQ(fidelity_of_scales(grid(row.from), grid(row.to), false, false), row.across);
  }
  const BlockGrid nvfp4 = grid(Dtype::f8_e4m3);
  EXPECT_EQ(fidelity_of_scales(nvfp4, nvfp4, true, false), exact);
  EXPECT_EQ(fidelity_of_scales(nvfp4, nvfp4, true, true), exact_where_scales_fit);
  BlockGrid divided = nvfp4;
  divided.divides_scales = true;
  EXPECT_EQ(fidelity_of_scales(divided, nvfp4, true, false), exact_where_scales_fit);
  BlockGrid inverse = grid(Dtype::f32);
  inverse.product = BlockProduct::code_over_scale;
  EXPECT_EQ(fidelity_of_scales(inverse, grid(Dtype::f32), true, false), exact_where_scales_fit);
  EXPECT_EQ(fidelity_of_scales(inverse, inverse, true, false), exact);
}

}  // namespace
}  // namespace loadstone::test
