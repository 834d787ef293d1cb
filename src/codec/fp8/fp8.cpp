// Recognises FP8 codes with one scale per tensor, row or block. See docs/formats/fp8.md
#include <array>
#include <utility>

#include "base/ceil_div.h"
#include "codec/families.h"
#include "codec/scaled/scaled.h"
#include "codec/unknown/foreign_scale.h"
#include "kernels/modelopt/scales.h"

namespace loadstone {

namespace {

// ---- decoding

using scaled::Layout;

template <typename Cut>
std::optional<Problem> prepare(const DecodeRequest& request, PreparedDecoder& made, Cut cut) {
  if (auto wrong =
          scaled::check_codes(request, 2, {Dtype::f8_e4m3, Dtype::f8_e5m2}, "F8_E4M3 or F8_E5M2")) {
    return wrong;
  }
  Layout form = {.weight = request.parts[0].encoding.dtype()};
  if (auto wrong = scaled::set_scale_dtype(request.parts[1], form)) return wrong;
  if (auto wrong = cut(form)) return wrong;
  scaled::finish(form, made);
  return std::nullopt;
}

std::optional<Problem> prepare_evenly(const DecodeRequest& request, PreparedDecoder& made) {
  return prepare(request, made, [&](Layout& form) { return scaled::cut_evenly(request, form); });
}

template <std::uint64_t rows, std::uint64_t columns>
std::optional<Problem> prepare_blocks(const DecodeRequest& request, PreparedDecoder& made) {
  return prepare(request, made,
                 [&](Layout& form) { return scaled::cut_by(request, rows, columns, form); });
}

constexpr std::uint64_t mx_columns = simd::mx_block;

constexpr ErrorBound error =
    error_bound::of_floats(Dtype::f8_e4m3, std::byte{0x7e}, Dtype::f8_e4m3);
// The OCP specification rounds exponents down, so magnitudes below 2^9 may have the scale for 448.
constexpr ErrorBound mx_error = error_bound::clamped(error, 512.0 / 448.0);

constexpr std::array kernels = {
    DecodeKernel{.name = "fp8_block", .prepare = prepare_evenly, .error = &error},
    DecodeKernel{.name = "fp8_block_128", .prepare = prepare_blocks<128, 128>, .error = &error},
    DecodeKernel{.name = "fp8_rows", .prepare = prepare_blocks<1, 0>, .error = &error},
    DecodeKernel{.name = "mxfp8", .prepare = prepare_blocks<1, mx_columns>, .error = &mx_error},
};

// ---- recognising

bool is_scale_name(std::string_view name) {
  return name.ends_with("_scale") || name.ends_with("_scale_inv") || name.ends_with("_scales");
}

// Recognises the encoding by shapes and dtypes. Each instance is used once.
class Recogniser {
 public:
  Recogniser(const TensorTable& table, std::uint32_t data, std::uint32_t scale)
      : table_(table),
        weight_(table[data]),
        scales_(table[scale]),
        made_(quantized_tensor(weight_.name, data, {scale})) {}

  QuantizedTensor run() && {
    const std::size_t rank = weight_.shape.rank();
    if (rank < 2) {
      refuse(made_, "q.shape", "is FP8 with scales, but is not a matrix",
             {weight_.name, scales_.name}, weight_.shape.text());
      return std::move(made_);
    }
    rows_ = weight_.shape[rank - 2];
    columns_ = weight_.shape[rank - 1];
    const Shape& shape = scales_.shape;
    const bool is_grid = shape.rank() == rank;
    // ModelOpt writes scales of blocks as [a, 1, b, 1].
    const bool is_spread = shape.rank() == 4 && rank == 2 && shape[1] == 1 && shape[3] == 1;
    const bool is_inverse =
        is_grid && scales_.name.ends_with("_inv") && !table_.claim().has_whole_scales;
    if (is_grid && is_mx()) {
      decode("mxfp8", "mxfp8");
    } else if (has_one_a_row(is_grid)) {
      decode("fp8-channel", "fp8_rows");
    } else if (is_spread) {
      decode("fp8-block", "fp8_block_128");
    } else if (has_one_a_matrix(is_grid) && !is_inverse) {
      decode("fp8", "fp8_block");
    } else {
      constexpr scaled::BlockCodec blocks = {"fp8-block", "fp8_block", "fp8_block_128"};
      scaled::decode_blocks(table_, made_, blocks, decoding());
    }
    return std::move(made_);
  }

 private:
  [[nodiscard]] bool is_mx() const {
    const std::size_t rank = scales_.shape.rank();
    return is_dtype(scales_, {Dtype::u8, Dtype::f8_e8m0}) && scales_.shape[rank - 2] == rows_ &&
           scales_.shape[rank - 1] == ceil_div(columns_, mx_columns);
  }

  [[nodiscard]] bool has_one_a_row(bool is_grid) const {
    const Shape& shape = scales_.shape;
    const std::size_t rank = shape.rank();
    if (is_grid) return rows_ > 1 && shape[rank - 2] == rows_ && shape[rank - 1] == 1;
    return rank + 1 == weight_.shape.rank() && rank > 0 && shape.numel() != 1u;
  }

  [[nodiscard]] bool has_one_a_matrix(bool is_grid) const {
    const Shape& shape = scales_.shape;
    const std::size_t rank = shape.rank();
    if (shape.numel() == 1u) return true;
    if (is_grid) return shape[rank - 2] == 1 && shape[rank - 1] == 1;
    return weight_.shape.rank() == 3 && shape == Shape({weight_.shape[0]});
  }

  void decode(std::string_view encoding, const char* kernel) {
    Decoding made = decoding();
    made.kernel = kernel;
    set_decoding(table_, made_, encoding, std::move(made));
  }

  [[nodiscard]] Decoding decoding() const {
    return {{}, {made_.data, made_.scales[0]}, weight_.shape, Dtype::bf16};
  }

  const TensorTable& table_;
  const TensorInfo& weight_;
  const TensorInfo& scales_;
  QuantizedTensor made_;
  std::uint64_t rows_ = 0;
  std::uint64_t columns_ = 0;
};

// FP8 tensors without scales are plain values, unless the config declares them as quantized.
std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& data = table[tensor];
  if (!is_fp8(data) || is_scale_name(data.name)) return std::nullopt;  // scales can be FP8 too
  const auto scale = table.find_any(data.name, {"_scale_inv", "_scale", "_weight_scale"});
  const auto other = table.find_any(data.name, {"_scale", "_weight_scale"});
  if (other != TensorTable::none && other != scale) {  // ambiguous: only one can be the scale
    QuantizedTensor made = quantized_tensor(data.name, tensor, {scale, other});
    refuse_layout(table, made);
    return made;
  }
  if (scale != TensorTable::none) return Recogniser(table, tensor, scale).run();
  if (auto unknown = unknown_codes(table, tensor)) return unknown;
  if (data.shape.rank() < 2 || !table.claim().is_made) return std::nullopt;
  QuantizedTensor made = quantized_tensor(data.name, tensor, {});
  refuse_without_scales(table, made);
  return made;
}

// ---- writing

using scaled::blocks_in;
using scaled::with_last;

void set_parts(const Shape& shape, Shape scales, Dtype scale, QuantizedLayout& form) {
  form.parts = {{"data", shape, Dtype::f8_e4m3}, {"scale", std::move(scales), scale}};
}

std::optional<Problem> write_whole(const Quantization& quantization, const Shape& shape,
                                   QuantizedLayout& form) {
  if (auto problem = scaled::begin_encoding(quantization, shape, form)) return problem;
  form.needs_amax = true;
  set_parts(shape, with_last(shape, 2, {}), scaled::scale_dtype(form), form);
  return std::nullopt;
}

std::optional<Problem> write_rows(const Quantization& quantization, const Shape& shape,
                                  QuantizedLayout& form) {
  if (auto problem = scaled::begin_matrices(quantization, shape, form)) return problem;
  form.window_elements = form.columns;
  set_parts(shape, with_last(shape, 1, {}), scaled::scale_dtype(form), form);
  return std::nullopt;
}

std::optional<Problem> write_blocks(const Quantization& quantization, const Shape& shape,
                                    QuantizedLayout& form) {
  constexpr std::uint64_t block = scaled::fp8_block;
  if (auto problem = scaled::begin_matrices(quantization, shape, form)) return problem;
  const bool is_cut = form.rows % block == 0 || form.stack == 1;
  form.window_elements = (is_cut ? std::min(form.rows, block) : form.rows) * form.columns;
  set_parts(shape,
            with_last(shape, 2, {blocks_in(form.rows, block), blocks_in(form.columns, block)}),
            scaled::scale_dtype(form), form);
  return std::nullopt;
}

std::optional<Problem> write_mx(const Quantization& quantization, const Shape& shape,
                                QuantizedLayout& form) {
  if (auto problem = scaled::begin_encoding(quantization, shape, form)) return problem;
  form.window_elements = scaled::window_of_blocks(form, mx_columns);
  set_parts(shape, with_last(shape, 1, {blocks_in(form.columns, mx_columns)}), Dtype::u8, form);
  return std::nullopt;
}

template <ComponentShape scale_shape>
constexpr std::array names = {ComponentName{"data", "weight"},
                              ComponentName{"scale", "weight_scale", scale_shape}};

constexpr std::array<std::string_view, 3> dialects = {"exact", "modelopt-compat",
                                                      "modelopt-export"};

constexpr std::array written = {
    WrittenEncoding{
        .name = "fp8",
        .kind = QuantizeKind::fp8,
        .bits = 8,
        .code_type = "float",
        .kernel = "fp8_block",
        .prepare = write_whole,
        .unified_names = names<ComponentShape::same>,
        .compressed_names = names<ComponentShape::one>,
        .unified = {"FP8", Described::weights_and_activations, 0, {}, false, true},
        .compressed = {"float-quantized", "tensor", "token"},
        .typical_error = 0.0264F,
        .decodes_experts = true,
        .dialects = dialects,
        .exported_dialect = "modelopt-export",
    },
    WrittenEncoding{
        .name = "fp8-channel",
        .kind = QuantizeKind::fp8_channel,
        .bits = 8,
        .code_type = "float",
        .kernel = "fp8_rows",
        .prepare = write_rows,
        .unified_names = names<ComponentShape::same>,
        .compressed_names = names<ComponentShape::column>,
        .unified = {"FP8_PER_CHANNEL_PER_TOKEN", Described::weights_and_activations, 0, "channel"},
        .compressed = {"float-quantized", "channel", "token"},
        .typical_error = 0.0264F,
        .decodes_experts = true,
    },
    WrittenEncoding{
        .name = "fp8-block",
        .kind = QuantizeKind::fp8_block,
        .bits = 8,
        .code_type = "float",
        .kernel = "fp8_block_128",
        .prepare = write_blocks,
        .unified_names = names<ComponentShape::blocks_4d>,
        .compressed_names = names<ComponentShape::same>,
        .unified = {"fp8_pb_wo"},
        .compressed = {"float-quantized", "block", "group"},
        .typical_error = 0.0264F,
    },
    WrittenEncoding{
        .name = "mxfp8",
        .kind = QuantizeKind::mxfp8,
        .bits = 8,
        .code_type = "float",
        .kernel = "mxfp8",
        .prepare = write_mx,
        .unified_names = names<ComponentShape::same>,
        .compressed_names = names<ComponentShape::same>,
        .unified = {"MXFP8", Described::weights_and_activations, mx_columns},
        .compressed = {"mxfp8-quantized", "group", {}, mx_columns, "torch.uint8"},
        .typical_error = 0.0266F,
        .exported_dialect = "modelopt-compat",
        .row_block = mx_columns,
    },
};

}  // namespace

constexpr std::array<std::string_view, 4> encodings = {"fp8", "fp8-channel", "fp8-block", "mxfp8"};

extern const Family fp8_family = {
    .kernels = kernels, .recognise = recognise, .encodings = encodings, .written = written};

}  // namespace loadstone
