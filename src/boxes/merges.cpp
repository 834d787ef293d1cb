#include "boxes/merges.h"

#include <fmt/format.h>

#include <cmath>
#include <utility>

#include "base/checked.h"
#include "base/named.h"
#include "base/text.h"
#include "boxes/cast_kind.h"
#include "boxes/sources.h"

namespace loadstone {

namespace {

// Maximum number of values computed at once, so that they stay in the nearer caches.
constexpr std::uint64_t piece_elements = 128 << 10;
// Limit, in elements, for keeping all right matrices of a target. Beyond it they are read
// repeatedly.
constexpr std::uint64_t right_elements_kept = 2 << 20;

// Returns true if [begin, begin + count) is inside [0, size).
bool lies_inside(std::uint64_t begin, std::uint64_t count, std::uint64_t size) {
  return begin <= size && count <= size - begin;
}

std::optional<Problem> check_place(const Merge& merge, const LowRank& product,
                                   std::uint64_t elements) {
  const std::uint64_t columns = merge.row_elements;
  if (columns == 0) return Problem{"a product must have whole rows", "row_elements 0"};
  const std::uint64_t rows = elements / columns;
  if (product.rows == 0 || product.columns == 0 || product.rank == 0) {
    return Problem{"a product must not be empty",
                   fmt::format("[{}, {}] of rank {}", product.rows, product.columns, product.rank)};
  }
  if (!lies_inside(product.row_begin, product.rows, rows) ||
      !lies_inside(product.column_begin, product.columns, columns)) {
    return Problem{"a product exceeds its target",
                   fmt::format("rows {} + {}, columns {} + {}", product.row_begin, product.rows,
                               product.column_begin, product.columns),
                   fmt::format("[{}, {}]", rows, columns)};
  }
  const std::uint64_t group = product.magnitude_columns;
  if (group != 0 && (product.magnitudes.empty() || product.columns % group != 0)) {
    return Problem{"magnitudes of columns must fill the columns of their product",
                   fmt::format("groups of {}", group), counted(product.columns, "column")};
  }
  constexpr std::uint64_t most = UINT64_MAX / 1024;  // sums of sizes in bytes fit 64 bits too
  const auto left = checked_mul(product.rows, product.rank);
  const auto right = checked_mul(round_up(product.columns, panel_columns), product.rank);
  if (!left || !right || *left > most || *right > most) {
    return Problem{"the size does not fit in 64 bits", fmt::format("rank {}", product.rank)};
  }
  return std::nullopt;
}

// Maximum number of terms that are values. More would only cost memory.
constexpr std::size_t values_max = 256;

std::optional<Problem> check_form(const Merge& merge) {
  const auto values =
      static_cast<std::size_t>(std::ranges::count_if(merge.terms, &Term::is_operand));
  if (!std::ranges::is_partitioned(merge.terms, &Term::is_operand)) {
    return Problem{.message =
                       "products and differences of adapters must be the last terms of a "
                       "merge",
                   .field = "terms"};
  }
  if (merge.op == MergeOp::slerp && values != 1) {
    return Problem{"a spherical interpolation needs exactly two values", std::to_string(values),
                   "1", "terms"};
  }
  const bool is_difference = merge.op == MergeOp::differences;
  if (is_difference && (values == 0 || values > values_max)) {
    return Problem{
        "loadstone does not merge this number of models by their differences from the base",
        std::to_string(values), fmt::format("1 to {}", values_max), "terms"};
  }
  if (!(merge.density > 0 && merge.density <= 1)) {
    return Problem{"a share must be greater than 0 and at most 1",
                   fmt::format("{}", merge.density),
                   {},
                   "density"};
  }
  if (!is_difference && (merge.pruning != Pruning::none || merge.elects_signs || merge.is_mean)) {
    return Problem{.message = "only differences can be pruned", .field = "form"};
  }
  return std::nullopt;
}

std::optional<Problem> check_operand(const Operand& operand, std::uint64_t elements,
                                     const std::vector<TensorInfo>& sources,
                                     std::span<const Decoding> decodings) {
  const std::uint64_t count = operand.elements == 0 ? elements : operand.elements;
  if (auto found = check_boxes(operand.boxes, count, sources, decodings)) return found;
  for (std::size_t b = 0; b < operand.boxes.size(); ++b) {
    const Encoding encoding = encoding_of(operand.boxes[b], sources, decodings);
    const CastKind way = cast_kind(encoding, Dtype::f32);
    if (way == CastKind::same || way == CastKind::cast) continue;
    return Problem{.message = "F32 cannot represent these values",
                   .found = std::string(encoding.name()),
                   .expected = "a floating dtype",
                   .box = b};
  }
  return std::nullopt;
}

}  // namespace

std::string_view name(MergeOp op) noexcept {
  return name_among({"sum", "slerp", "differences"}, op);
}

std::string_view name(Pruning pruning) noexcept {
  return name_among({"none", "random", "smallest"}, pruning);
}

std::optional<Problem> check_merge(const Merge& merge, std::uint64_t elements,
                                   const std::vector<TensorInfo>& sources,
                                   std::span<const Decoding> decodings) {
  if (merge.terms.empty() && merge.factor == 1) {
    return Problem{.message = "a merge needs terms or a factor", .field = "terms"};
  }
  if (auto found = check_form(merge)) return found;
  // Merges compute whole rows, even if no product needs them.
  if (merge.row_elements != 0 && elements % merge.row_elements != 0) {
    return Problem{"the target's elements do not fill whole rows", std::to_string(elements),
                   fmt::format("rows of {}", merge.row_elements), "row_elements"};
  }
  const auto not_finite = [](std::string field) {
    return Problem{.message = "a factor must be finite", .field = std::move(field)};
  };
  if (!std::isfinite(merge.factor)) return not_finite("factor");
  for (std::size_t t = 0; t < merge.terms.size(); ++t) {
    const Term& term = merge.terms[t];
    const std::string field = fmt::format("terms[{}]", t);
    if (!std::isfinite(term.factor)) return not_finite(field + ".factor");
    if (!term.low_rank) continue;
    auto found = term.boxes.empty() ? check_place(merge, *term.low_rank, elements)
                                    : Problem{"a product also needs boxes"};
    if (!found) continue;
    found->field = field;
    return found;
  }
  std::optional<Problem> first;
  for_each_operand(merge, [&](const Operand& operand) {
    if (first) return;
    first = check_operand(operand, elements, sources, decodings);
    if (first) first->field = fmt::format("terms[{}].{}", operand.term, operand.name);
  });
  return first;
}

std::uint64_t measuring_passes(const Merge& merge) noexcept {
  const auto columns = std::ranges::count_if(merge.terms, has_column_magnitudes);
  // A threshold needs two passes: for the upper and for the lower bits of magnitudes.
  const unsigned whole = merge.op == MergeOp::slerp           ? 1
                         : merge.pruning == Pruning::smallest ? 2
                                                              : 0;
  return whole + static_cast<std::uint64_t>(columns);
}

bool needs_whole_rows(const Merge& merge) noexcept {
  return std::ranges::any_of(merge.terms, [](const Term& term) {
    return term.low_rank && !term.low_rank->magnitudes.empty();
  });
}

MergeSizes merge_sizes(const Merge& merge, std::uint64_t elements) noexcept {
  MergeSizes sizes = {.piece = std::min(piece_elements, elements)};
  if (merge.op == MergeOp::differences) {
    sizes.buffers =
        1 + static_cast<std::uint64_t>(std::ranges::count_if(merge.terms, &Term::is_operand));
    if (merge.pruning == Pruning::smallest) {
      sizes.counts = (sizes.buffers - 1) * magnitude_bins;
    }
  }
  const std::uint64_t columns = merge.row_elements;
  if (columns == 0) return sizes;
  std::uint64_t rank = 0;
  for (const Term& term : merge.terms) {
    if (term.low_rank) rank = std::max(rank, term.low_rank->rank);
  }
  // Limits a piece's rows so that their left matrix takes no more memory than their values. A piece
  // has at least one row.
  const std::uint64_t most = std::max<std::uint64_t>(piece_elements / std::max(rank, columns), 1);
  const std::uint64_t rows = std::min(most, elements / columns);
  sizes.piece = needs_whole_rows(merge) ? rows * columns : std::min(rows * columns, sizes.piece);
  std::uint64_t total = 0;
  for (const Term& term : merge.terms) {
    if (!term.low_rank) continue;
    const LowRank& product = *term.low_rank;
    const std::uint64_t right = product.rank * round_up(product.columns, panel_columns);
    sizes.right = std::max(sizes.right, right);
    total = saturating_add(total, right);
    if (has_column_magnitudes(term)) {
      sizes.counts = std::max(sizes.counts, product.columns);
      sizes.factors = saturating_add(sizes.factors, product.columns);
    }
    // A piece that begins inside a row touches one more row.
    sizes.left = std::max(sizes.left, std::min(rows + 1, product.rows) * product.rank);
  }
  sizes.right = std::max(sizes.right, std::min(total, right_elements_kept));
  return sizes;
}

}  // namespace loadstone
