// Values that are computed from several others on their way, in addition to a recipe's boxes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "loadstone/recipe.h"

namespace loadstone {

// The product of two matrices, left [rows, rank] times right [rank, columns], added to a part of a
// target that is taken as a matrix: a low-rank update (LoRA), of all of it or of one expert, of the
// queries of fused projections. Both are read as F32; element [i, j] is
// ((left[i, 0] * right[0, j] + left[i, 1] * right[1, j]) + ...), in F32 and in this order.
struct LowRank {
  std::uint64_t row_begin = 0;  // of the target's matrix
  std::uint64_t column_begin = 0;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::uint64_t rank = 0;
  std::vector<Box> left;
  std::vector<Box> right;
  // DoRA: one for each row. Once the product is added, the part's row is multiplied with its
  // magnitude divided by the row's norm. None: rows stay as they are.
  std::vector<Box> magnitudes;

  friend bool operator==(const LowRank&, const LowRank&) = default;
};

// A value that is multiplied with a factor and added.
struct Term {
  float factor = 1;
  std::vector<Box> boxes;           // of the target's shape, read as F32
  std::optional<LowRank> low_rank;  // in place of boxes

  friend bool operator==(const Term&, const Term&) = default;
};

// How terms with boxes go together with the recipe's own boxes.
enum class MergeOp : std::uint8_t {
  sum,          // `factor` times the boxes, and then the terms one after the other
  slerp,        // one term: the arc from the boxes (0) to it (its factor 1)
  differences,  // boxes, and `factor` times the mean or sum of what terms differ from them by
};

// Which elements of a difference become 0.
enum class Pruning : std::uint8_t {
  none,
  random,    // the others are divided by the density (DARE)
  smallest,  // by magnitude (TIES)
};

// In F32, rounded once to the target's dtype. Products come last, in any form. docs/merge.md has
// the order of all operations.
struct Merge {
  MergeOp op = MergeOp::sum;
  float factor = 1;
  std::vector<Term> terms;
  // Columns of the target as a matrix, for products. 0: there are none.
  std::uint64_t row_elements = 0;
  // ---- of differences
  Pruning pruning = Pruning::none;
  double density = 1;         // the share of elements that are kept
  std::uint64_t seed = 0;     // of random pruning
  std::string draws_as{};     // the name that it draws by; empty: the target's. A tie draws once
  bool elects_signs = false;  // only differences with the sign of their sum count
  bool is_mean = false;       // the sum is divided by the factors that went into it

  friend bool operator==(const Merge&, const Merge&) = default;
};

}  // namespace loadstone
