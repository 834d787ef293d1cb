// Measures whole values for merges that need their statistics. Each value is therefore read again
// for each of measuring_passes().
#include <algorithm>
#include <cmath>
#include <vector>

#include "engine/merge_reader.h"
#include "kernels/merge.h"
#include "kernels/task_vectors.h"

namespace loadstone {

namespace {

// Beyond this cosine, values are parallel or opposite and have no unique arc between them. Below
// this norm, a value has no direction.
constexpr double dot_linear = 0.9995;
constexpr double norm_least = 1e-8;

// Returns the factors of the two values for spherical interpolation at `place`.
MergeStatistics::Numbers arc_factors(const DotSums& sums, double place) {
  const double norm_a = std::sqrt(sums.a);
  const double norm_b = std::sqrt(sums.b);
  const bool are_directions = norm_a > norm_least && norm_b > norm_least;
  const double dot = are_directions ? std::clamp(sums.ab / norm_a / norm_b, -1.0, 1.0) : 1.0;
  if (std::abs(dot) > dot_linear) {
    return {static_cast<float>(1 - place), static_cast<float>(place)};
  }
  const double angle = std::acos(dot);
  return {static_cast<float>(std::sin((1 - place) * angle) / std::sin(angle)),
          static_cast<float>(std::sin(place * angle) / std::sin(angle))};
}

}  // namespace

void MergeReader::measure() {
  auto found = statistics_.of(*value_, [&] { return measure_all(); });
  if (found) {
    measured_ = *std::move(found);
  } else {
    value_ = nullptr;  // the work was stopped, so the reader is not used again
  }
}

// Later measurements depend on earlier ones.
std::optional<MergeStatistics::Measured> MergeReader::measure_all() {
  measured_ = {};
  const bool is_arc = merge_->op == MergeOp::slerp;
  if (is_arc || merge_->pruning == Pruning::smallest) {
    auto terms = is_arc ? measure_arc() : measure_magnitudes();
    if (!terms) return std::nullopt;
    measured_.terms = *std::move(terms);
  }
  for (std::size_t t = summands_; t < merge_->terms.size(); ++t) {
    if (has_column_magnitudes(merge_->terms[t]) && !measure_columns(t)) return std::nullopt;
  }
  return measured_;
}

// Appends the factors of the product's columns. Returns false if the run was stopped.
bool MergeReader::measure_columns(std::size_t term) {
  const LowRank& product = *merge_->terms[term].low_rank;
  const std::uint64_t group = product.magnitude_columns;
  const std::uint64_t count = product.magnitude_count();
  const std::uint64_t width = merge_->row_elements;
  CountedMemory memory(memory_, count * sizeof(double));
  memory.use(0, memory.size());
  auto* const sums = reinterpret_cast<double*>(memory.data());
  std::fill_n(sums, count, 0.0);
  const std::uint64_t first = product.row_begin * width;
  const std::uint64_t last = first + product.rows * width;
  for (std::uint64_t begin = first; begin < last; begin += sizes_.piece) {
    const std::uint64_t end = std::min(last, begin + sizes_.piece);
    combine(begin, end);
    if (is_stopped()) return false;
    add_terms(term, begin, end);
    add_low_rank(term, begin, end);
    if (is_stopped()) return false;
    for (std::uint64_t row = begin / width; row < end / width; ++row) {
      add_squares(row_of(product, row, begin), product.columns, group, sums);
    }
  }
  std::vector<float> magnitudes(count);
  open_operand(product.magnitudes, {count}, magnitudes_field);
  read_numbers(0, count, magnitudes.data());
  if (is_stopped()) return false;
  require_finite(magnitudes, magnitudes_field);
  for (std::uint64_t column = 0; column < product.columns; ++column) {
    const auto norm = static_cast<float>(std::sqrt(sums[column / group]));
    measured_.columns.push_back(magnitudes[column / group] / norm);
  }
  return true;
}

std::optional<MergeStatistics::Numbers> MergeReader::measure_arc() {
  const std::uint64_t elements = value_->elements();
  DotSums sums;
  for (std::uint64_t begin = 0; begin < elements; begin += sizes_.piece) {
    const std::uint64_t end = std::min(elements, begin + sizes_.piece);
    read_operand(value_->boxes, 0, begin, end);
    read_operand(merge_->terms.front().boxes, 1, begin, end);
    if (is_stopped()) return std::nullopt;
    add_dots(buffer(0), buffer(1), end - begin, sums);
  }
  return arc_factors(sums, merge_->terms.front().factor);
}

// Returns false if the run was stopped.
template <typename Visit>
bool MergeReader::for_each_difference(const Visit& visit) {
  const std::uint64_t elements = value_->elements();
  for (std::uint64_t begin = 0; begin < elements; begin += sizes_.piece) {
    const std::uint64_t end = std::min(elements, begin + sizes_.piece);
    read_operand(value_->boxes, 0, begin, end);
    for (std::size_t t = 0; t < summands_; ++t) {
      read_operand(merge_->terms[t].boxes, 1, begin, end);
      if (is_stopped()) return false;
      subtract(buffer(1), buffer(0), end - begin);
      visit(t, buffer(1), end - begin);
    }
  }
  return true;
}

// Returns for each difference the smallest magnitude that the merge keeps.
std::optional<MergeStatistics::Numbers> MergeReader::measure_magnitudes() {
  CountedMemory memory(memory_, sizes_.counts * sizeof(std::uint64_t));
  memory.use(0, memory.size());
  auto* const counts = reinterpret_cast<std::uint64_t*>(memory.data());
  const auto bins_of = [&](std::size_t t) { return counts + t * magnitude_bins; };
  if (!for_each_difference([&](std::size_t t, const float* numbers, std::uint64_t count) {
        count_upper(numbers, count, bins_of(t));
      })) {
    return std::nullopt;
  }
  const auto elements = static_cast<double>(value_->elements());
  const auto kept =
      static_cast<std::uint64_t>(std::max(1.0, std::floor(merge_->density * elements)));
  std::vector<std::uint32_t> upper;
  std::vector<std::uint64_t> left(summands_, kept);
  for (std::size_t t = 0; t < summands_; ++t) upper.push_back(bin_of_largest(bins_of(t), left[t]));
  std::fill_n(counts, sizes_.counts, std::uint64_t{0});
  if (!for_each_difference([&](std::size_t t, const float* numbers, std::uint64_t count) {
        count_lower(numbers, count, upper[t], bins_of(t));
      })) {
    return std::nullopt;
  }
  MergeStatistics::Numbers thresholds;
  for (std::size_t t = 0; t < summands_; ++t) {
    thresholds.push_back(magnitude_of_bins(upper[t], bin_of_largest(bins_of(t), left[t])));
  }
  return thresholds;
}

}  // namespace loadstone
