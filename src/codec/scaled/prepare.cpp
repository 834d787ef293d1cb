#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/ceil_div.h"
#include "base/text.h"
#include "codec/scaled/scaled.h"

namespace loadstone::scaled {

namespace {

// Multiplies the extent of dimension `from_end`, counted from the end. Returns nullopt on overflow.
std::optional<Shape> widened(const Shape& shape, std::uint64_t factor, std::size_t from_end) {
  auto extents = shape.extents();
  if (extents.size() < from_end) return std::nullopt;
  std::uint64_t& extent = extents[extents.size() - from_end];
  if (extent > UINT64_MAX / factor) return std::nullopt;
  extent *= factor;
  Shape wide(std::move(extents));
  if (!wide.numel()) return std::nullopt;
  return wide;
}

void start(const DecodeRequest& request, Layout& form) {
  form.dtype = request.dtype;
  form.elements = request.shape.numel().value_or(0);
}

}  // namespace

bool is_one_of(Encoding encoding, std::initializer_list<Dtype> dtypes) noexcept {
  return std::ranges::any_of(dtypes, [&](Dtype dtype) { return encoding == Encoding(dtype); });
}

std::optional<Problem> check_codes(const DecodeRequest& request, std::size_t parts,
                                   std::initializer_list<Dtype> dtypes, const char* expected,
                                   std::uint64_t per_byte, std::size_t from_end) {
  if (request.parts.size() != parts) {
    return Problem{parts == 3 ? "the decoder needs a weight, its scales and a global scale"
                              : "the decoder needs a weight and its scales",
                   counted(request.parts.size(), "tensor"), counted(parts, "tensor")};
  }
  const DecodePart& codes = request.parts[0];
  if (!is_one_of(codes.encoding, dtypes)) {
    return Problem{"the decoder does not support the dtype of the weight",
                   std::string(codes.encoding.name()), expected};
  }
  const auto made = widened(codes.shape, per_byte, from_end);
  if (!made) return Problem{"the size does not fit in 64 bits", codes.shape.text()};
  if (*made == request.shape) return std::nullopt;
  return Problem{"the decoded values have a different shape", request.shape.text(), made->text()};
}

std::optional<Problem> set_scale_dtype(const DecodePart& scales,
                                       std::initializer_list<Dtype> dtypes, const char* expected,
                                       Layout& form) {
  if (!is_one_of(scales.encoding, dtypes)) {
    return Problem{"the decoder does not support the dtype of the scales",
                   std::string(scales.encoding.name()), expected};
  }
  form.scale = scales.encoding.dtype();
  return std::nullopt;
}

std::optional<Problem> set_scale_dtype(const DecodePart& scales, Layout& form) {
  return set_scale_dtype(scales, {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::f8_e8m0, Dtype::u8},
                         "F32, BF16, F16, F8_E8M0 or U8", form);
}

std::optional<Problem> cut_evenly(const DecodeRequest& request, Layout& form) {
  const Shape& shape = request.shape;
  const Shape& scales = request.parts[1].shape;
  if (shape.rank() < 2)
    return Problem{"the weight is not a matrix or a stack of matrices", shape.text()};
  start(request, form);
  const std::size_t rank = scales.rank();
  const std::uint64_t rows = shape[shape.rank() - 2];
  form.columns = shape[shape.rank() - 1];
  form.matrix_elements = rows * form.columns;  // cannot overflow: the product of all dims does not
  const std::uint64_t scale_rows = rank < 2 ? 1 : scales[rank - 2];
  form.scale_columns = rank < 2 ? 1 : scales[rank - 1];
  form.scale_count = scales.numel().value_or(0);
  if (form.scale_count == 0 || rows % scale_rows != 0 || form.columns % form.scale_columns != 0) {
    return Problem{"the shape of the scales does not divide the weight into blocks", scales.text(),
                   "scales that divide " + shape.text()};
  }
  form.block_rows = rows / scale_rows;
  form.block_columns = form.columns / form.scale_columns;
  const std::uint64_t per_matrix = scale_rows * form.scale_columns;
  const std::uint64_t matrices = form.elements / form.matrix_elements;
  const std::uint64_t scale_matrices = form.scale_count / per_matrix;
  if (scale_matrices != 1 && scale_matrices != matrices) {
    return Problem{"the weight and its scales have different numbers of matrices", scales.text(),
                   "scales for " + shape.text()};
  }
  form.matrix_scales = scale_matrices == 1 ? 0 : per_matrix;
  return std::nullopt;
}

std::optional<Problem> cut_by(const DecodeRequest& request, std::uint64_t block_rows,
                              std::uint64_t block_columns, Layout& form) {
  const Shape& shape = request.shape;
  const Shape& scales = request.parts[1].shape;
  if (shape.rank() < 2)
    return Problem{"the weight is not a matrix or a stack of matrices", shape.text()};
  start(request, form);
  const std::uint64_t rows = shape[shape.rank() - 2];
  form.columns = shape[shape.rank() - 1];
  form.matrix_elements = rows * form.columns;  // cannot overflow: the product of all dims does not
  form.block_rows = block_rows;
  form.block_columns = block_columns == 0 ? form.columns : block_columns;
  form.scale_columns = ceil_div(form.columns, form.block_columns);
  form.matrix_scales = ceil_div(rows, block_rows) * form.scale_columns;
  form.scale_count = form.elements / form.matrix_elements * form.matrix_scales;
  auto expected = shape.extents();
  expected[expected.size() - 2] = ceil_div(rows, block_rows);
  expected.back() = form.scale_columns;
  const Shape whole(expected);
  expected.pop_back();
  const bool is_vector = form.scale_columns == 1 && scales == Shape(expected);
  // ModelOpt writes a dimension of 1 after each dimension that counts blocks.
  expected.insert(expected.end(), {1, form.scale_columns, 1});
  const bool is_spread = block_rows > 1 && scales == Shape(std::move(expected));
  if (is_vector || is_spread || scales == whole) return std::nullopt;
  return Problem{"the numbers of blocks and scales differ", scales.text(), whole.text()};
}

std::optional<Problem> cut_in_tiles(const DecodeRequest& request, std::uint64_t block_columns,
                                    Layout& form) {
  const Shape& shape = request.shape;
  if (shape.rank() != 2 || shape[1] % block_columns != 0) {
    return Problem{"the weight is not a matrix whose rows are whole blocks", shape.text()};
  }
  start(request, form);
  form.is_tiled = true;
  form.columns = shape[1];
  form.matrix_elements = form.elements;
  form.block_columns = block_columns;
  form.scale_columns = form.columns / block_columns;
  const Shape padded = {ceil_div(shape[0], 128) * 128, ceil_div(form.scale_columns, 4) * 4};
  form.scale_count = padded.numel().value_or(0);
  const Shape& scales = request.parts[1].shape;
  if (scales.numel() == form.scale_count) return std::nullopt;
  return Problem{"the numbers of blocks and scales differ", scales.text(), padded.text()};
}

std::optional<Problem> set_global(const DecodeRequest& request, Global global, Layout& form) {
  const DecodePart& part = request.parts[2];
  form.global = global;
  form.global_count = part.shape.numel().value_or(0);
  const std::uint64_t matrices = form.elements / form.matrix_elements;
  if (!is_one_of(part.encoding, {Dtype::f32})) {
    return Problem{"the global scale has the wrong dtype", std::string(part.encoding.name()),
                   "F32"};
  }
  if (form.global_count == 1 || form.global_count == matrices) return std::nullopt;
  return Problem{"the numbers of global scales and matrices differ", part.shape.text(),
                 std::to_string(matrices)};
}

std::optional<Problem> set_zeros(const DecodeRequest& request, Layout& form) {
  const DecodePart& part = request.parts[2];
  form.has_zeros = true;
  if (!is_one_of(part.encoding, {Dtype::i8})) {
    return Problem{"the zero points have the wrong dtype", std::string(part.encoding.name()), "I8"};
  }
  if (part.shape == request.parts[1].shape) return std::nullopt;
  return Problem{"the numbers of scales and zero points differ", part.shape.text(),
                 request.parts[1].shape.text()};
}

}  // namespace loadstone::scaled
