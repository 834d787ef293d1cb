// The boxes that the terms of merges read, the check that they fit, and the memory that they
// take.
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

// "sum", "slerp", "differences"; "none", "random", "smallest"
[[nodiscard]] std::string_view name(MergeOp op) noexcept;
[[nodiscard]] std::string_view name(Pruning pruning) noexcept;

// Values that a merge reads as F32, in addition to those of the recipe's own boxes.
struct Operand {
  const std::vector<Box>& boxes;
  std::uint64_t elements = 0;  // 0: as many as the target has
  const char* name = "";       // "boxes", "left" ...: its field in a plan's JSON
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
      visit(Operand{product.magnitudes, product.rows, "magnitudes", t});
    }
  }
}

// Visits all boxes that a recipe or a value reads: its own, and those of its terms.
template <typename Boxes, typename Visit>
void for_each_box(const Boxes& recipe, const Visit& visit) {
  for (const Box& box : recipe.boxes) visit(box);
  if (recipe.merge == nullptr) return;
  for_each_operand(*recipe.merge, [&](const Operand& operand) {
    for (const Box& box : operand.boxes) visit(box);
  });
}

// Checks sizes, places and boxes: everything but the decodings themselves. `elements`: of the
// target. A problem names its field: "terms[2].left".
[[nodiscard]] std::optional<Problem> check_merge(const Merge& merge, std::uint64_t elements,
                                                 const std::vector<TensorInfo>& sources,
                                                 std::span<const Decoding> decodings);

// Returns true if whole values must be measured before any result can be computed.
[[nodiscard]] constexpr bool is_measured(const Merge& merge) noexcept {
  return merge.op == MergeOp::slerp || merge.pruning == Pruning::smallest;
}

// Returns true if rows must be complete, to have norms.
[[nodiscard]] bool needs_whole_rows(const Merge& merge) noexcept;

// Memory in which a thread computes a merge, in F32 values. It depends on the merge and its target
// only, so windows never change the result.
struct MergeSizes {
  std::uint64_t piece = 0;    // values made at once
  std::uint64_t buffers = 2;  // of one piece each: the sum, and the term to add
  std::uint64_t left = 0;     // rows of left matrices for such a piece
  std::uint64_t right = 0;    // right matrices that are kept
  std::uint64_t counts = 0;   // while magnitudes are counted, of 64 bits each

  // Three regions: each keeps the size of the largest that a thread has met.
  [[nodiscard]] std::uint64_t number_bytes() const noexcept {
    return (buffers * piece + left) * sizeof(float);
  }
  [[nodiscard]] std::uint64_t right_bytes() const noexcept { return right * sizeof(float); }
  [[nodiscard]] std::uint64_t count_bytes() const noexcept {
    return counts * sizeof(std::uint64_t);
  }
};
[[nodiscard]] MergeSizes merge_sizes(const Merge& merge, std::uint64_t elements) noexcept;

}  // namespace loadstone
