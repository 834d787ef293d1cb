#include "engine/merge_reader.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>
#include <utility>

#include "kernels/cast.h"
#include "kernels/merge.h"
#include "kernels/task_vectors.h"
#include "loadstone/error.h"

namespace loadstone {

namespace {

constexpr std::size_t f32_bytes = sizeof(float);

// Suffixes that name an operand of a product in messages.
constexpr const char* left_field = " (left matrix)";
constexpr const char* right_field = " (right matrix)";

// Marks floats of a buffer as used, and returns their address.
float* used(CountedMemory& memory, std::uint64_t begin, std::uint64_t count) {
  memory.use(begin * f32_bytes, (begin + count) * f32_bytes);
  return reinterpret_cast<float*>(memory.data()) + begin;
}

// Provides memory for at least `numbers` floats. Reuses memory that is large enough.
void provide(std::optional<CountedMemory>& memory, MemoryCount& count, std::uint64_t numbers) {
  if (memory && memory->size() >= numbers * f32_bytes) return;
  memory.reset();
  memory.emplace(count, numbers * f32_bytes);
}

}  // namespace

void MergeReader::open(const Value& value) {
  const std::uint64_t elements = value.elements();
  const Merge& merge = *value.merge;
  // Callers check plans. This check protects memory if a caller did not.
  if (auto found = check_merge(merge, elements, values_.tensors(), values_.decodings)) {
    throw_problem("plan.box", *found, {.tensor = std::string(value.name)});
  }
  value_ = &value;
  merge_ = &merge;
  sizes_ = merge_sizes(merge, elements);
  operand_ = nullptr;
  kept_.clear();
  right_used_ = 0;
  summands_ = static_cast<std::size_t>(std::ranges::find_if_not(merge.terms, &Term::is_operand) -
                                       merge.terms.begin());
  provide(numbers_, memory_, sizes_.buffers * sizes_.piece + sizes_.left);
  if (sizes_.right > 0) provide(right_, memory_, sizes_.right);
  if (measuring_passes(merge) > 0) measure();
}

void MergeReader::open_operand(std::span<const Box> boxes, const Shape& shape, const char* field) {
  if (operand_ == boxes.data()) return;
  const std::string name = std::string(value_->name) + field;
  reader_.open({.name = name, .shape = &shape, .dtype = Dtype::f32, .boxes = boxes},
               values_.decodings);
  operand_ = boxes.data();
}

void MergeReader::read_numbers(std::uint64_t begin, std::uint64_t end, float* to) {
  reader_.read(begin, end, std::as_writable_bytes(std::span(to, end - begin)));
}

std::uint64_t MergeReader::read(const Value& value, std::uint64_t begin, std::uint64_t end,
                                std::span<std::byte> to) {
  if (begin == end) return end;
  operand_ = nullptr;  // the reader may have been opened for a different operand
  if (value_ != &value) open(value);
  if (is_stopped()) return end;
  const Cast cast = cast_between(Dtype::f32, value.dtype);
  if (cast.run == nullptr) {
    throw Error("plan.dtype", "the output of a merge must be a float dtype with whole bytes",
                {.tensor = std::string(value.name), .found = std::string(name(value.dtype))});
  }
  const std::size_t size = element_bytes(value.dtype);
  std::uint64_t bad = end;
  const std::uint64_t row = needs_whole_rows(*merge_) ? merge_->row_elements : 1;
  // A window may begin or end inside a row, but rows must be computed as a whole.
  for (std::uint64_t at = begin / row * row; at < end;) {
    const std::uint64_t rest = round_up(end, row) - at;
    const std::uint64_t next = at + std::min(rest, sizes_.piece);
    make_piece(at, next);
    if (is_stopped()) return end;
    const std::uint64_t first = std::max(at, begin);
    const std::uint64_t last = std::min(next, end);
    const std::byte* const from = numbers_->data() + (first - at) * f32_bytes;
    std::byte* const place = to.data() + (first - begin) * size;
    at = next;
    if (cast.watched != nullptr && !cast.watched(from, place, last - first)) continue;
    if (cast.watched == nullptr) cast.run(from, place, last - first);
    if (cast.overflow != nullptr) overflow_ += cast.overflow(from, 1, last - first);
    const std::uint64_t finite = finite_numbers(Dtype::f32, from, last - first);
    if (first + finite < last) bad = std::min(bad, first + finite);
  }
  return bad;
}

float* MergeReader::buffer(std::uint64_t number) const {
  return reinterpret_cast<float*>(numbers_->data()) + number * sizes_.piece;
}

// Reads elements [begin, end) of an operand with the target's shape into buffer `number`.
void MergeReader::read_operand(std::span<const Box> boxes, std::uint64_t number,
                               std::uint64_t begin, std::uint64_t end) {
  open_operand(boxes, *value_->shape, "");
  read_numbers(begin, end, used(*numbers_, number * sizes_.piece, end - begin));
}

void MergeReader::make_piece(std::uint64_t begin, std::uint64_t end) {
  combine(begin, end);
  add_terms(merge_->terms.size(), begin, end);
}

// Computes the operation of the merge, without the terms that are added after it.
void MergeReader::combine(std::uint64_t begin, std::uint64_t end) {
  read_operand(value_->boxes, 0, begin, end);
  if (merge_->op == MergeOp::differences) {
    add_differences(begin, end);
  } else {
    add_values(begin, end);
  }
}

// Adds the products and differences of adapters among the first `count` terms.
void MergeReader::add_terms(std::size_t count, std::uint64_t begin, std::uint64_t end) {
  std::uint64_t first_factor = 0;  // of the columns of a product
  for (std::size_t t = summands_; t < count && !is_stopped(); ++t) {
    const Term& term = merge_->terms[t];
    if (!term.low_rank) {
      read_operand(term.boxes, 1, begin, end);
      if (is_stopped()) return;
      add_scaled(buffer(0), buffer(1), end - begin, term.factor);
      continue;
    }
    add_low_rank(t, begin, end);
    if (is_stopped() || term.low_rank->magnitudes.empty()) continue;
    if (!has_column_magnitudes(term)) {
      normalise_rows(*term.low_rank, begin, end);
      continue;
    }
    normalise_columns(*term.low_rank, first_factor, begin, end);
    first_factor += term.low_rank->columns;
  }
}

void MergeReader::add_values(std::uint64_t begin, std::uint64_t end) {
  const bool is_arc = merge_->op == MergeOp::slerp;
  const float factor = is_arc ? measured_.terms.front() : merge_->factor;
  if (factor != 1) scale(buffer(0), end - begin, factor);
  for (std::size_t t = 0; t < summands_; ++t) {
    read_operand(merge_->terms[t].boxes, 1, begin, end);
    if (is_stopped()) return;
    add_scaled(buffer(0), buffer(1), end - begin,
               is_arc ? measured_.terms.back() : merge_->terms[t].factor);
  }
}

void MergeReader::add_differences(std::uint64_t begin, std::uint64_t end) {
  const std::uint64_t count = end - begin;
  for (std::size_t t = 0; t < summands_; ++t) {
    read_operand(merge_->terms[t].boxes, 1 + t, begin, end);
    if (is_stopped()) return;
    float* const difference = buffer(1 + t);
    subtract(difference, buffer(0), count);
    if (merge_->pruning == Pruning::smallest) drop_small(difference, count, measured_.terms[t]);
    if (merge_->pruning == Pruning::random) {
      const std::string_view name =
          merge_->draws_as.empty() ? value_->name : std::string_view(merge_->draws_as);
      const std::uint64_t key = random_key(merge_->seed, name, t);
      drop_random(difference, begin, count, key, merge_->density);
    }
    if (merge_->terms[t].factor != 1) scale(difference, count, merge_->terms[t].factor);
  }
  join_differences(count);
  add_scaled(buffer(0), buffer(1), count, merge_->factor);
}

// Combines the buffers; the result replaces the first buffer.
void MergeReader::join_differences(std::uint64_t count) {
  std::vector<float*> values;
  std::vector<float> factors;
  for (std::size_t t = 0; t < summands_; ++t) {
    values.push_back(buffer(1 + t));
    factors.push_back(merge_->terms[t].factor);
  }
  if (merge_->elects_signs) {
    add_elected(values, merge_->is_mean ? factors : std::vector<float>(), count);
    return;
  }
  for (std::size_t t = 1; t < summands_; ++t) add_scaled(values[0], values[t], count, 1);
  if (!merge_->is_mean) return;
  float divisor = 0;
  for (const float factor : factors) divisor = divisor + factor;
  if (std::abs(divisor) >= 1e-8F) divide(values[0], count, divisor);
}

// Adds a product to the rows that the piece contains. The first and the last of these rows may be
// incomplete.
void MergeReader::add_low_rank(std::size_t t, std::uint64_t begin, std::uint64_t end) {
  const Term& term = merge_->terms[t];
  const LowRank& product = *term.low_rank;
  const std::uint64_t width = merge_->row_elements;
  const auto [row_begin, row_end] = rows_of(product, begin, end);
  if (row_begin >= row_end) return;
  const float* const panels = panels_of(t);
  const std::uint64_t left_begin = (row_begin - product.row_begin) * product.rank;
  const std::uint64_t left_count = (row_end - row_begin) * product.rank;
  float* const left = used(*numbers_, sizes_.buffers * sizes_.piece, left_count);
  open_operand(product.left, {product.rows, product.rank}, left_field);
  read_numbers(left_begin, left_begin + left_count, left);
  if (is_stopped()) return;
  require_finite({left, left_count}, left_field);
  float* const sum = buffer(0);
  for (std::uint64_t row = row_begin; row < row_end;) {
    const std::uint64_t first = row * width + product.column_begin;
    const std::uint64_t from = std::max(first, begin);
    const std::uint64_t to = std::min(first + product.columns, end);
    // Complete rows are multiplied together.
    const bool is_whole = from == first && to == first + product.columns;
    const std::uint64_t whole_end = std::min(row_end, end / width);
    const std::uint64_t rows = is_whole && whole_end > row ? whole_end - row : 1;
    if (from < to) {
      add_product({.sum = sum + (from - begin),
                   .sum_stride = width,
                   .left = left + (row - row_begin) * product.rank,
                   .panels = panels,
                   .rank = product.rank,
                   .rows = rows,
                   .column_begin = from - first,
                   .columns = to - from,
                   .factor = term.factor});
    }
    row += rows;
  }
}

// Returns the rows of the product that the piece contains; empty if begin >= end.
ElementRange MergeReader::rows_of(const LowRank& product, std::uint64_t begin,
                                  std::uint64_t end) const {
  const std::uint64_t width = merge_->row_elements;
  return {std::max(begin / width, product.row_begin),
          std::min(ceil_div(end, width), product.row_begin + product.rows)};
}

// Returns the first element of the product in a row of a piece that consists of whole rows.
float* MergeReader::row_of(const LowRank& product, std::uint64_t row, std::uint64_t begin) const {
  return buffer(0) + (row * merge_->row_elements + product.column_begin - begin);
}

// Requires that the piece consists of whole rows.
void MergeReader::normalise_rows(const LowRank& product, std::uint64_t begin, std::uint64_t end) {
  const auto [row_begin, row_end] = rows_of(product, begin, end);
  if (row_begin >= row_end) return;
  const std::uint64_t rows = row_end - row_begin;
  float* const magnitudes = used(*numbers_, sizes_.piece, rows);
  open_operand(product.magnitudes, {product.rows}, magnitudes_field);
  read_numbers(row_begin - product.row_begin, row_end - product.row_begin, magnitudes);
  if (is_stopped()) return;
  require_finite({magnitudes, rows}, magnitudes_field);
  for (std::uint64_t r = 0; r < rows; ++r) {
    float* const row = row_of(product, row_begin + r, begin);
    scale(row, product.columns, magnitudes[r] / norm(row, product.columns));
  }
}

// Requires that the piece consists of whole rows.
void MergeReader::normalise_columns(const LowRank& product, std::uint64_t first_factor,
                                    std::uint64_t begin, std::uint64_t end) {
  const auto [row_begin, row_end] = rows_of(product, begin, end);
  for (std::uint64_t row = row_begin; row < row_end; ++row) {
    multiply(row_of(product, row, begin), measured_.columns.data() + first_factor, product.columns);
  }
}

void MergeReader::require_finite(std::span<const float> numbers, const char* field) const {
  const auto is_none = [](float number) { return !std::isfinite(number); };
  const auto wrong = std::ranges::find_if(numbers, is_none);
  if (wrong == numbers.end()) return;
  throw Error("q.nan", "a value of an adapter is NaN or infinite",
              {.tensor = std::string(value_->name) + field,
               .found = std::isnan(*wrong) ? "NaN" : "infinity",
               .expected = "finite values"});
}

// Returns the right matrix of a product in panels. If all right matrices of the value fit into
// memory, each is read only once per value.
const float* MergeReader::panels_of(std::size_t t) {
  const auto known = std::ranges::find(kept_, t, &Kept::term);
  if (known != kept_.end()) return known->panels;
  const LowRank& product = *merge_->terms[t].low_rank;
  const std::uint64_t numbers = product.rank * round_up(product.columns, panel_columns);
  if (right_used_ + numbers > sizes_.right) {
    kept_.clear();
    right_used_ = 0;
  }
  float* const panels = used(*right_, right_used_, numbers);
  std::fill_n(panels, numbers, 0.0F);
  open_operand(product.right, {product.rank, product.columns}, right_field);
  float* const part = buffer(1);
  // Reads several rows at once if they fit, because each pass over a transposed matrix reads all of
  // it.
  const std::uint64_t width = std::min(product.columns, sizes_.piece);
  const std::uint64_t height = sizes_.piece / width;
  for (std::uint64_t row = 0; row < product.rank; row += height) {
    const std::uint64_t rows = std::min(height, product.rank - row);
    for (std::uint64_t column = 0; column < product.columns; column += width) {
      const std::uint64_t columns = std::min(width, product.columns - column);
      const std::uint64_t at = row * product.columns + column;
      static_cast<void>(used(*numbers_, sizes_.piece, rows * columns));
      read_numbers(at, at + rows * columns, part);
      if (is_stopped()) return panels;
      require_finite({part, rows * columns}, right_field);
      for (std::uint64_t r = 0; r < rows; ++r) {
        pack_row(part + r * columns, row + r, product.rank, column, columns, panels);
      }
    }
  }
  right_used_ += numbers;
  kept_.push_back({t, panels});
  return panels;
}

}  // namespace loadstone
