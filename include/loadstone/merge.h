// Values computed from several sources, in addition to a recipe's boxes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "loadstone/recipe.h"

namespace loadstone {

// A low-rank update (LoRA): left [rows, rank] times right [rank, columns], added to a part of a
// target that is treated as a matrix: the whole target, one expert, or the queries of a fused
// projection. Both are read as F32; element [i, j] is
// ((left[i, 0] * right[0, j] + left[i, 1] * right[1, j]) + ...), in F32 and in this order.
struct LowRank {
  std::uint64_t row_begin = 0;  // of the target's matrix
  std::uint64_t column_begin = 0;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::uint64_t rank = 0;
  std::vector<Box> left;
  std::vector<Box> right;
  // DoRA: one magnitude per row. After the product is added, each row of the part is multiplied by
  // its magnitude divided by the row's norm. nullopt: rows are unchanged.
  std::vector<Box> magnitudes;

  friend bool operator==(const LowRank&, const LowRank&) = default;
};

// A value to multiply by a factor and add.
struct Term {
  float factor = 1;
  std::vector<Box> boxes;           // with the target's shape, read as F32
  std::optional<LowRank> low_rank;  // in place of boxes

  friend bool operator==(const Term&, const Term&) = default;
};

// The operation that combines terms with the recipe's own boxes.
enum class MergeOp : std::uint8_t {
  sum,          // `factor` times the boxes, plus each term in order
  slerp,        // one term: the arc from the boxes (0) to the term (its factor 1)
  differences,  // the boxes, plus `factor` times the mean or sum of differences from them
};

// Elements of a difference that become 0.
enum class Pruning : std::uint8_t {
  none,
  random,    // the others are divided by the density (DARE)
  smallest,  // by magnitude (TIES)
};

// Computed in F32 and rounded once to the target's dtype. Products come last, in any form.
// docs/merge.md has the order of all operations.
struct Merge {
  MergeOp op = MergeOp::sum;
  float factor = 1;
  std::vector<Term> terms;
  // Columns of the target as a matrix, for products. 0: no products.
  std::uint64_t row_elements = 0;
  // ---- For differences
  Pruning pruning = Pruning::none;
  double density = 1;         // fraction of elements to keep
  std::uint64_t seed = 0;     // for random pruning
  std::string draws_as{};     // name that seeds the draw; empty: the target's. A tie draws once
  bool elects_signs = false;  // use only differences with the sign of their sum
  bool is_mean = false;       // divide the sum by the total of its factors

  friend bool operator==(const Merge&, const Merge&) = default;
};

}  // namespace loadstone
