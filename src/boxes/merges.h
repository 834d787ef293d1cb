// Finds the boxes that the terms of a merge read, checks that they fit, and computes the memory
// that a merge takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ceil_div.h"
#include "boxes/check_boxes.h"
#include "kernels/merge.h"
#include "kernels/task_vectors.h"
#include "loadstone/catalog.h"
#include "loadstone/merge.h"
#include "loadstone/recipe.h"

namespace loadstone {

// Return the names in plans: "sum", "slerp", "differences"; "none", "random", "smallest".
[[nodiscard]] std::string_view name(MergeOp op) noexcept;
[[nodiscard]] std::string_view name(Pruning pruning) noexcept;

// Values that a merge reads as F32, in addition to those of the recipe's own boxes.
struct Operand {
  const std::vector<Box>& boxes;
  std::uint64_t elements = 0;  // 0: as many as the target has
  const char* name = "";       // field in a plan's JSON, such as "boxes" or "left"
  std::size_t term = 0;
};

template <typename Visit>
void for_each_operand(const Merge& merge, const Visit& visit) {
  for (std::size_t t = 0; t < merge.terms.size(); ++t) {
    const Term& term = merge.terms[t];
    if (!term.low_rank) {
      visit(Operand{term.boxes, 0, "boxes", t});
      continue;
    }
    const LowRank& product = *term.low_rank;
    visit(Operand{product.left, product.rows * product.rank, "left", t});
    visit(Operand{product.right, product.rank * product.columns, "right", t});
    if (!product.magnitudes.empty()) {
      visit(Operand{product.magnitudes, product.magnitude_count(), "magnitudes", t});
    }
  }
}

// Visits all boxes that a recipe or a value reads: its own boxes, and those of its terms.
template <typename Boxes, typename Visit>
void for_each_box(const Boxes& recipe, const Visit& visit) {
  for (const Box& box : recipe.boxes) visit(box);
  if (recipe.merge == nullptr) return;
  for_each_operand(*recipe.merge, [&](const Operand& operand) {
    for (const Box& box : operand.boxes) visit(box);
  });
}

// Checks sizes, positions and boxes, but not the decodings themselves. `elements`: number of
// elements of the target. A problem names its field, such as "terms[2].left".
[[nodiscard]] std::optional<Problem> check_merge(const Merge& merge, std::uint64_t elements,
                                                 const std::vector<TensorInfo>& sources,
                                                 std::span<const Decoding> decodings);

// Returns how often a merge reads its operands to measure them, before it computes any result.
[[nodiscard]] std::uint64_t measuring_passes(const Merge& merge) noexcept;

// Returns true if the product's magnitudes belong to columns, whose norms must be measured.
[[nodiscard]] inline bool has_column_magnitudes(const Term& term) noexcept {
  return term.low_rank && !term.low_rank->magnitudes.empty() &&
         term.low_rank->magnitude_columns != 0;
}

// Returns true if the merge needs complete rows, because it divides them by their norms.
[[nodiscard]] bool needs_whole_rows(const Merge& merge) noexcept;

// Memory that a thread needs for a merge, in F32 values. It depends only on the merge and its
// target, so that windows never change the result.
struct MergeSizes {
  std::uint64_t piece = 0;    // values computed at once
  std::uint64_t buffers = 2;  // number of buffers of one piece: for the sum, and for the next term
  std::uint64_t left = 0;     // rows of left matrices for a piece
  std::uint64_t right = 0;    // right matrices that are kept
  std::uint64_t counts = 0;   // counters of magnitudes or sums of columns, with 64 bits each
  std::uint64_t factors = 0;  // of columns, for all products with magnitudes of columns

  // Sizes of a thread's three memory regions. A region keeps the largest size that it has needed.
  [[nodiscard]] std::uint64_t number_bytes() const noexcept {
    return (buffers * piece + left) * sizeof(float);
  }
  [[nodiscard]] std::uint64_t right_bytes() const noexcept { return right * sizeof(float); }
  [[nodiscard]] std::uint64_t count_bytes() const noexcept {
    return counts * sizeof(std::uint64_t) + factors * sizeof(float);
  }
};
[[nodiscard]] MergeSizes merge_sizes(const Merge& merge, std::uint64_t elements) noexcept;

}  // namespace loadstone
