// Recognises, decodes and writes ModelOpt's 4-bit integers in two layouts. For some shapes, a
// weight fits both layouts. See docs/formats/modelopt.md
#include <array>
#include <optional>
#include <utility>

#include "codec/families.h"
#include "codec/scaled/scaled.h"
#include "kernels/modelopt/scales.h"

namespace loadstone {

namespace {

constexpr std::uint64_t block = scaled::int4_block;
// If shapes fit both layouts, a conversion writes "int4" or "int4-awq" under this key of the
// header's metadata.
constexpr std::string_view metadata_key = "loadstone.int4";

// ---- decoding

using scaled::Codes;
using scaled::Layout;

// `is_flat`: U8 [..., columns / 2] and inverse scales F32, F16 or BF16 [..., blocks, 1] for blocks
// of 128 values. Otherwise: U8 [..., rows / 2, columns] and scales F32 [..., rows, columns / 128].
template <bool is_flat>
std::optional<Problem> prepare(const DecodeRequest& request, PreparedDecoder& made) {
  Layout form = {.codes = is_flat ? Codes::offset_nibbles : Codes::row_pairs,
                 .dtype = request.dtype};
  if (auto wrong = scaled::check_codes(request, 2, {Dtype::u8}, "U8", 2, is_flat ? 1 : 2)) {
    return wrong;
  }
  const DecodePart& scales = request.parts[1];
  auto wrong = is_flat ? scaled::set_scale_dtype(scales, {Dtype::f32, Dtype::f16, Dtype::bf16},
                                                 "F32, F16 or BF16", form)
                       : scaled::set_scale_dtype(scales, {Dtype::f32}, "F32", form);
  if (wrong) return wrong;
  const Shape& shape = request.shape;
  if (shape.rank() < 2)
    return Problem{"the weight is not a matrix or a stack of matrices", shape.text()};
  auto expected = shape.extents();
  const std::uint64_t columns = expected.back();
  const std::uint64_t matrix = expected[expected.size() - 2] * columns;
  if ((is_flat ? matrix : columns) % block != 0) {
    return Problem{"the weight does not fill whole blocks of 128 values", shape.text()};
  }
  expected.back() = is_flat ? 1 : columns / block;
  if (is_flat) expected[expected.size() - 2] = matrix / block;
  if (scales.shape != Shape(expected)) {
    return Problem{"the numbers of blocks and scales differ", scales.shape.text(),
                   Shape(std::move(expected)).text()};
  }
  form.elements = made.elements;
  form.matrix_elements = form.elements;
  form.columns = is_flat ? block : columns;
  form.block_columns = block;
  form.scale_columns = form.columns / block;
  form.scale_count = form.elements / block;
  form.matrix_scales = form.scale_count;
  scaled::finish(form, made);
  return std::nullopt;
}

// The largest code, 7, is stored as 15 because of an offset of 8.
constexpr ErrorBound offset_error = error_bound::of_integers(7, std::byte{0xff}, Dtype::u8);
constexpr ErrorBound error = error_bound::of_integers(7, std::byte{0x77}, Dtype::u8);

constexpr std::array kernels = {
    DecodeKernel{.name = "int4_blocks", .prepare = prepare<true>, .error = &offset_error},
    DecodeKernel{.name = "int4_row_pairs", .prepare = prepare<false>, .error = &error},
};

// ---- recognising

// Shape of the decoded tensor in each layout; nullopt if weight and scales do not fit that layout.
struct Int4Shapes {
  std::optional<Shape> blocks;     // data, scales: [..., rows, columns / 2], [..., blocks, 1]
  std::optional<Shape> row_pairs;  // [..., rows / 2, columns], [..., rows, columns / 128]
};

Int4Shapes int4_shapes(const Shape& weight, const Shape& scales) {
  Int4Shapes shapes;
  const std::size_t rank = weight.rank();
  if (rank < 2 || scales.rank() != rank || !weight.numel()) return shapes;
  for (std::size_t i = 0; i + 2 < rank; ++i) {
    if (weight[i] != scales[i]) return shapes;
  }
  const std::uint64_t rows = weight[rank - 2];
  const std::uint64_t columns = weight[rank - 1];
  const std::uint64_t bytes = rows * columns;  // cannot overflow: numel() did not
  if (bytes > UINT64_MAX / 4 || bytes == 0) return shapes;
  auto extents = weight.extents();
  if (scales[rank - 1] == 1 && bytes % (block / 2) == 0 &&
      scales[rank - 2] == bytes / (block / 2)) {
    extents[rank - 1] = 2 * columns;
    shapes.blocks = Shape(extents);
    extents[rank - 1] = columns;
  }
  if (scales[rank - 2] == 2 * rows && columns % block == 0 && scales[rank - 1] == columns / block) {
    extents[rank - 2] = 2 * rows;
    shapes.row_pairs = Shape(std::move(extents));
  }
  return shapes;
}

std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& data = table[tensor];
  if (!is_dtype(data, {Dtype::u8})) return std::nullopt;
  const auto scale = table.find_any(data.name, {"_scale", "_weight_scale"});
  if (scale == TensorTable::none) return std::nullopt;
  const TensorInfo& scales = table[scale];
  if (!is_dtype(scales, {Dtype::f32, Dtype::f16, Dtype::bf16})) return std::nullopt;
  const Int4Shapes shapes = int4_shapes(data.shape, scales.shape);
  const bool may_be_pairs = shapes.row_pairs && is_dtype(scales, {Dtype::f32});
  if (!shapes.blocks && !may_be_pairs) return std::nullopt;
  const std::string_view said = table.metadata(metadata_key);
  const bool is_said = said == "int4" || said == "int4-awq";
  QuantizedTensor made = quantized_tensor(data.name, tensor, {scale});
  if (shapes.blocks && may_be_pairs && !is_said) {
    refuse(made, "q.scale_shape", "can be int4 or int4-awq: its scales fit both encodings",
           {scales.name}, scales.shape.text());
  } else if (shapes.blocks && (!may_be_pairs || said == "int4")) {
    set_decoding(table, made, "int4",
                 {"int4_blocks", {tensor, scale}, *shapes.blocks, Dtype::bf16});
  } else {
    set_decoding(table, made, "int4-awq",
                 {"int4_row_pairs", {tensor, scale}, *shapes.row_pairs, Dtype::bf16});
  }
  return made;
}

// ---- writing

std::optional<Problem> write_flat(const Quantization& quantization, const Shape& shape,
                                  QuantizedLayout& form) {
  if (auto problem = scaled::begin_encoding(quantization, shape, form)) return problem;
  if (form.matrix_elements() % block != 0 || form.columns % 2 != 0) {
    return Problem{"the matrix does not fill whole blocks of 128 values", shape.text(),
                   "an even number of columns, and rows * columns a multiple of 128"};
  }
  form.window_elements = block;
  form.parts = {{"data", scaled::with_last(shape, 1, {form.columns / 2}), Dtype::u8},
                {"scale", scaled::with_last(shape, 2, {form.matrix_elements() / block, 1}),
                 scaled::scale_dtype(form)}};
  return std::nullopt;
}

std::optional<Problem> write_row_pairs(const Quantization& quantization, const Shape& shape,
                                       QuantizedLayout& form) {
  if (auto problem = scaled::begin_encoding(quantization, shape, form)) return problem;
  if (shape.rank() < 2 || form.columns % block != 0 || form.rows % 2 != 0) {
    return Problem{
        "the matrix has an odd number of rows, or its rows are not whole blocks of 128 values",
        shape.text(), "an even number of rows, and columns a multiple of 128"};
  }
  form.window_elements = 2 * form.columns;
  form.parts = {
      {"data", scaled::with_last(shape, 2, {form.rows / 2, form.columns}), Dtype::u8},
      {"scale", scaled::with_last(shape, 1, {form.columns / block}), Dtype::f32},
  };
  return std::nullopt;
}

// Returns true if data and scales fit both layouts, which depends only on the number of columns.
template <std::uint64_t columns>
bool is_ambiguous(const Shape& shape) noexcept {
  return shape.rank() > 1 && shape[shape.rank() - 1] == columns;
}

constexpr std::array names = {ComponentName{"data", "weight"},
                              ComponentName{"scale", "weight_scale"}};

constexpr std::array written = {
    WrittenEncoding{
        .name = "int4",
        .kind = QuantizeKind::int4,
        .bits = 4,
        .code_type = "int",
        .kernel = "int4_blocks",
        .prepare = write_flat,
        .unified_names = names,
        .unified = {"int4", Described::nothing, block},
        .typical_error = 0.1174F,
        .exported_dialect = "modelopt-compat",
        .is_ambiguous = is_ambiguous<2 * block>,
        .metadata_key = metadata_key,
    },
    WrittenEncoding{
        .name = "int4-awq",
        .kind = QuantizeKind::int4_awq,
        .bits = 4,
        .code_type = "int",
        .kernel = "int4_row_pairs",
        .prepare = write_row_pairs,
        .unified_names = names,
        .unified = {"W4A16_AWQ", Described::weights, block, {}, true},
        .typical_error = 0.1174F,
        .exported_dialect = "modelopt-compat",
        .row_block = block,
        .is_ambiguous = is_ambiguous<block>,
        .metadata_key = metadata_key,
    },
};

}  // namespace

constexpr std::array<std::string_view, 2> encodings = {"int4", "int4-awq"};

extern const Family int4_family = {
    .kernels = kernels, .recognise = recognise, .encodings = encodings, .written = written};

}  // namespace loadstone
