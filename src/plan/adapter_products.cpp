#include "plan/adapter_products.h"

#include <fmt/format.h>

#include <utility>

#include "base/text.h"
#include "loadstone/error.h"

namespace loadstone {

void refuse_unfit(std::string message, std::string found, std::string expected) {
  throw Error("merge.adapter", std::move(message),
              {.found = std::move(found), .expected = std::move(expected)});
}

void refuse_malformed(std::string message, std::string found, std::string expected) {
  throw Error("format.adapter", std::move(message),
              {.found = std::move(found), .expected = std::move(expected)});
}

namespace {

[[noreturn]] void misfit(const AdapterPlace& place, const AdapterProduct& product,
                         const Shape& shape) {
  refuse_unfit(fmt::format("a LoRA product does not fit the shape of '{}'", printable(place.name)),
               fmt::format("[{}, {}]", product.out, product.in), shape.text());
}

// Returns true if the magnitudes belong to the inputs of a module: [1, in] for a linear layer and
// [1, in, 1, 1] for a convolution, as LyCORIS writes them. peft has the same shape for the outputs
// of a convolution, but under a different name.
bool belong_to_inputs(const AdapterPart& magnitudes, const AdapterProduct& product) {
  const Shape& shape = magnitudes.source.shape;
  const bool is_row = shape.rank() >= 2 && shape[0] == 1;
  return is_row && magnitudes.name.ends_with(".dora_scale") && shape[1] == shape.numel() &&
         shape[1] * product.kernel == product.in;
}

// Returns true if there is one magnitude for each output: [out], [out, 1, ...] or [1, out, 1, 1].
bool belong_to_outputs(const AdapterPart& magnitudes, const AdapterProduct& product) {
  const Shape& shape = magnitudes.source.shape;
  if (shape.rank() == 0 || shape.numel() != product.out) return false;
  if (shape[0] == product.out) return true;
  return !magnitudes.name.ends_with(".dora_scale") && shape.rank() > 2 && shape[1] == product.out;
}

}  // namespace

AdapterProduct product_of(const AdapterModule& module, const MergeNumbers& numbers) {
  const Shape& left = module.left->source.shape;
  const Shape& right = module.right->source.shape;
  AdapterProduct product = {.left = numbers.view(module.left->source),
                            .right = numbers.view(module.right->source)};
  const std::uint64_t left_count = left.numel().value_or(0);
  const std::uint64_t right_count = right.numel().value_or(0);
  const bool is_sound = left.rank() >= 2 && left.rank() == right.rank() && left_count > 0 &&
                        right_count > 0 && left[0] * left[1] == left_count && left[1] == right[0];
  if (!is_sound) {
    refuse_malformed("the shapes of a module's two LoRA matrices do not fit each other",
                     left.text(), right.text());
  }
  product.out = left[0];
  product.rank = left[1];
  product.in = right_count / right[0];
  product.kernel = product.in / right[1];
  static_cast<void>(reshape(product.left, {product.out, product.rank}));
  static_cast<void>(reshape(product.right, {product.rank, product.in}));
  return product;
}

std::uint64_t row_elements(const AdapterPlace& place, const Shape& shape) {
  if (place.part == AdapterPlace::Part::expert) return shape.rank() == 3 ? shape[2] : 0;
  return shape.rank() < 2 || shape[0] == 0 ? 0 : shape.numel().value_or(0) / shape[0];
}

bool set_rows(const Shape& shape, const AdapterPlace& place, const AdapterProduct& product,
              bool may_be_transposed, LowRank& low_rank) {
  const std::uint64_t width = row_elements(place, shape);
  const std::uint64_t rows = width == 0 ? 0 : shape[0];
  const bool is_transposed = may_be_transposed && width == product.out && rows == product.in;
  low_rank.rank = product.rank;
  low_rank.rows = is_transposed ? product.in : product.out;
  low_rank.columns = is_transposed ? product.out : product.in;
  if (width != low_rank.columns || low_rank.rows > rows) misfit(place, product, shape);
  const std::uint64_t rest = rows - low_rank.rows;
  const bool is_pair = place.name.ends_with("gate_up_proj.weight");
  const bool is_half = rest == low_rank.rows;
  bool fits = false;
  switch (place.part) {
    case AdapterPlace::Part::first:
      fits = is_pair ? is_half : rest > 0 && rest % 2 == 0;
      break;
    case AdapterPlace::Part::middle:  // keys are followed by as many rows of values
      fits = rest > low_rank.rows;
      low_rank.row_begin = fits ? rest - low_rank.rows : 0;
      break;
    case AdapterPlace::Part::last:
      fits = is_pair ? is_half : rest > low_rank.rows;
      low_rank.row_begin = rest;
      break;
    default:
      fits = rest == 0;
  }
  if (!fits) misfit(place, product, shape);
  return is_transposed;
}

bool set_expert(const Shape& shape, const AdapterPlace& place, const AdapterProduct& product,
                LowRank& low_rank) {
  const std::uint64_t out = place.shares * product.out;
  const bool has_expert = shape.rank() == 3 && place.expert < shape[0];
  const bool fits = has_expert && shape[1] == out && shape[2] == product.in;
  const bool fits_transposed = has_expert && shape[1] == product.in && shape[2] == out;
  if (!fits && !fits_transposed) misfit(place, product, shape);
  if (fits && fits_transposed && !place.is_transposed) {
    refuse_unfit(
        fmt::format("the layout of the experts in '{}' is ambiguous", printable(place.name)),
        fmt::format("[{}, {}]", product.out, product.in), shape.text());
  }
  const bool is_transposed = fits_transposed && (!fits || *place.is_transposed);
  low_rank.rank = product.rank;
  low_rank.rows = is_transposed ? product.in : product.out;
  low_rank.columns = is_transposed ? product.out : product.in;
  low_rank.row_begin = place.expert * shape[1];
  (is_transposed ? low_rank.column_begin : low_rank.row_begin) += place.share * product.out;
  return is_transposed;
}

void set_magnitudes(const AdapterPart& magnitudes, const AdapterProduct& product,
                    bool is_transposed, MergeNumbers& numbers, LowRank& low_rank) {
  const MergeSource& source = magnitudes.source;
  const bool is_by_input = belong_to_inputs(magnitudes, product);
  if (!source.is_number || (!is_by_input && !belong_to_outputs(magnitudes, product))) {
    refuse_malformed("a module needs one magnitude for each output, or for each input as [1, in]",
                     source.shape.text(),
                     fmt::format("[{}] or [1, {}]", product.out, product.in / product.kernel));
  }
  View view = numbers.view(source);
  static_cast<void>(reshape(view, {source.shape.numel().value_or(0)}));
  low_rank.magnitudes = numbers.boxes(source, view);
  if (is_by_input != is_transposed) {
    low_rank.magnitude_columns = is_by_input ? product.kernel : 1;
  }
}

}  // namespace loadstone
