// Merges: values that a recipe computes from several sources, in addition to its boxes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "loadstone/recipe.h"

namespace loadstone {

// A low-rank update (LoRA): left [rows, rank] times right [rank, columns], added to a part of a
// target that is treated as a matrix: the whole target, one expert, or the queries of a fused
// projection. `left` and `right` are read as F32. Element [i, j] is
// ((left[i, 0] * right[0, j] + left[i, 1] * right[1, j]) + ...), in F32 and in this order.
struct LowRank {
  std::uint64_t row_begin = 0;  // first row of the part in the target's matrix
  std::uint64_t column_begin = 0;
  std::uint64_t rows = 0;
  std::uint64_t columns = 0;
  std::uint64_t rank = 0;
  std::vector<Box> left{};
  std::vector<Box> right{};
  // DoRA: after the product is added, each row of the part, or each group of columns, is multiplied
  // by its magnitude divided by its norm. Empty: nothing is multiplied.
  std::vector<Box> magnitudes{};
  // Number of adjacent columns that share a magnitude; 0: one magnitude per row.
  std::uint64_t magnitude_columns = 0;

  [[nodiscard]] std::uint64_t magnitude_count() const noexcept {
    return magnitude_columns == 0 ? rows : columns / magnitude_columns;
  }

  friend bool operator==(const LowRank&, const LowRank&) = default;
};

// A value that is multiplied by a factor and added to the recipe's value.
struct Term {
  float factor = 1;
  std::vector<Box> boxes{};           // fill the target's shape, read as F32
  std::optional<LowRank> low_rank{};  // replaces the boxes
  // The boxes are added after the operation of the merge, as products are: an adapter's difference.
  bool is_added = false;

  // Returns true if the operation of the merge combines the term with the recipe's boxes.
  [[nodiscard]] bool is_operand() const noexcept { return !low_rank && !is_added; }
  friend bool operator==(const Term&, const Term&) = default;
};

// The operation that combines terms with the recipe's own boxes.
enum class MergeOp : std::uint8_t {
  sum,          // `factor` times the boxes, plus each term in order
  slerp,        // the point at the term's factor on the arc from the boxes (0) to the term (1)
  differences,  // the boxes, plus `factor` times the mean or sum of terms minus boxes
};

// The elements of a difference that are set to 0.
enum class Pruning : std::uint8_t {
  none,
  random,    // elements drawn at random; the others are divided by the density (DARE)
  smallest,  // the elements of the smallest magnitude (TIES)
};

// The merge of one target, computed in F32 and rounded once to the target's dtype. Low-rank
// products and differences of adapters are added last, in every MergeOp. docs/merge.md has the
// order of all operations.
struct Merge {
  MergeOp op = MergeOp::sum;
  float factor = 1;
  std::vector<Term> terms{};
  // Number of columns of the target as a matrix, for low-rank products. 0: the merge has no
  // products.
  std::uint64_t row_elements = 0;
  // ---- The following members are for MergeOp::differences.
  Pruning pruning = Pruning::none;
  double density = 1;      // fraction of elements to keep
  std::uint64_t seed = 0;  // for random pruning
  // Name that seeds the random pruning; empty: the target's name. Ties share it, so that they drop
  // the same elements.
  std::string draws_as{};
  bool elects_signs = false;  // use only differences with the sign of their sum
  bool is_mean = false;       // divide the sum by the total of the terms' factors

  friend bool operator==(const Merge&, const Merge&) = default;
};

}  // namespace loadstone
