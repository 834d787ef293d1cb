// Recognises and decodes E2M1 codes with block scales: NVFP4 and MXFP4, under four naming styles.
// See docs/formats/modelopt.md
#include <fmt/format.h>

#include <array>
#include <utility>

#include "base/ceil_div.h"
#include "codec/families.h"
#include "codec/fp4/blocks.h"
#include "codec/scaled/scaled.h"
#include "codec/unknown/foreign_scale.h"
#include "kernels/modelopt/scales.h"

namespace loadstone {

namespace {

constexpr std::uint32_t none = TensorTable::none;

// ---- decoding

using scaled::Codes;
using scaled::Global;
using scaled::Layout;

using scaled::nvfp4_block;
using simd::mx_block;
constexpr std::uint64_t mxfp4_block_bytes = 16;

std::optional<Problem> prepare_block(const DecodeRequest& request, PreparedDecoder& made) {
  Layout form = {.codes = Codes::fp4};
  if (auto wrong = scaled::check_codes(request, 2, {Dtype::i8, Dtype::u8}, "I8 or U8", 2)) {
    return wrong;
  }
  if (auto wrong = scaled::set_scale_dtype(request.parts[1], form)) return wrong;
  if (auto wrong = scaled::cut_evenly(request, form)) return wrong;
  scaled::finish(form, made);
  return std::nullopt;
}

template <Global global>
std::optional<Problem> prepare_nvfp4(const DecodeRequest& request, PreparedDecoder& made) {
  Layout form = {.codes = Codes::fp4};
  if (auto wrong = scaled::check_codes(request, 3, {Dtype::i8, Dtype::u8}, "I8 or U8", 2)) {
    return wrong;
  }
  if (auto wrong = scaled::set_scale_dtype(request.parts[1], {Dtype::f8_e4m3}, "F8_E4M3", form)) {
    return wrong;
  }
  if (auto wrong = scaled::cut_by(request, 1, nvfp4_block, form)) return wrong;
  if (auto wrong = scaled::set_global(request, global, form)) return wrong;
  scaled::finish(form, made);
  return std::nullopt;
}

// Returns the shape of the values of [..., groups, 16] bytes: [..., groups * 32].
Shape ungrouped(const Shape& shape) {
  auto extents = shape.extents();
  if (extents.size() < 2) return shape;
  const std::uint64_t bytes = extents.back();
  extents.pop_back();
  extents.back() *= 2 * bytes;  // on overflow the kernel gets a different shape and rejects it
  return Shape(std::move(extents));
}

// GPT-OSS stores blocks as U8 [..., groups, 16] and scales as U8 [..., groups].
std::optional<Problem> prepare_mxfp4(const DecodeRequest& request, PreparedDecoder& made) {
  if (request.parts.size() != 2) {
    return Problem{"the decoder needs a weight and its scales",
                   std::to_string(request.parts.size()) + " tensors", "2 tensors"};
  }
  const DecodePart& blocks = request.parts[0];
  const DecodePart& scales = request.parts[1];
  if (!scaled::is_one_of(blocks.encoding, {Dtype::u8})) {
    return Problem{"the decoder does not support the dtype of the weight",
                   std::string(blocks.encoding.name()), "U8"};
  }
  auto groups = blocks.shape.extents();
  if (groups.size() < 2 || groups.back() != mxfp4_block_bytes) {
    return Problem{"the tensor does not consist of blocks of 16 bytes", blocks.shape.text(),
                   "[..., groups, 16]"};
  }
  if (const Shape shape = ungrouped(blocks.shape); shape != request.shape) {
    return Problem{"the decoded values have a different shape", request.shape.text(), shape.text()};
  }
  Layout form = {.codes = Codes::fp4, .dtype = request.dtype, .by_exponent = true};
  if (auto wrong = scaled::set_scale_dtype(scales, {Dtype::u8}, "U8", form)) return wrong;
  groups.pop_back();
  if (scales.shape.extents() != groups) {
    return Problem{"the numbers of blocks and scales differ", scales.shape.text(),
                   Shape(groups).text()};
  }
  form.elements = made.elements;
  form.matrix_elements = form.elements;
  form.block_columns = 2 * mxfp4_block_bytes;
  form.columns = groups.back() * form.block_columns;
  form.scale_columns = groups.back();
  form.scale_count = form.elements / form.block_columns;
  scaled::finish(form, made);
  return std::nullopt;
}

constexpr ErrorBound e2m1_error = error_bound::of_floats(Dtype::f4, std::byte{0x77}, Dtype::u8);
// The OCP specification rounds exponents down, so magnitudes below 2^3 may have the scale for 6.
constexpr ErrorBound mx_error = error_bound::clamped(e2m1_error, 8.0 / 6.0);
// Scales in E4M3 are at most 1/17 too small, which is half a step of 2^-3 above 1. Subnormal scales
// are off by at most half of 2^-9, relative to the largest scale, 448.
constexpr ErrorBound nvfp4_error = error_bound::with_scale_codes(
    error_bound::clamped(e2m1_error, 17.0 / 16.0), 0x1p-10 / 448, std::byte{0x7e});

const std::array kernels = {
    DecodeKernel{.name = "fp4_block", .prepare = prepare_block, .error = &mx_error},
    DecodeKernel{.name = "nvfp4", .prepare = prepare_nvfp4<Global::factor>, .error = &nvfp4_error},
    DecodeKernel{.name = "nvfp4_divided",
                 .prepare = prepare_nvfp4<Global::divisor>,
                 .error = &nvfp4_error,
                 .divides_by_outer = true},
    DecodeKernel{.name = "mxfp4", .prepare = prepare_mxfp4, .error = &mx_error},
    mxfp4_block_kernels[0],
    mxfp4_block_kernels[1],
    mxfp4_block_kernels[2],
};

// ---- recognising

Shape doubled(const Shape& shape) {
  auto extents = shape.extents();
  if (!extents.empty()) extents.back() *= 2;  // on overflow the kernel rejects the shape
  return Shape(std::move(extents));
}

Shape in_blocks(const Shape& shape, std::uint64_t block) {
  auto extents = shape.extents();
  if (!extents.empty()) extents.back() = ceil_div(extents.back(), block);
  return Shape(std::move(extents));
}

// Suffixes that are appended to the tensor's name, and the kernel for NVFP4.
struct Naming {
  std::string_view scale;
  std::string_view global;
  const char* nvfp4;  // the kernel that decodes NVFP4
};

// Decodes NVFP4 if scales are F8_E4M3 (which needs a global scale), or MXFP4 if scales are powers
// of two.
void decode(const TensorTable& table, QuantizedTensor& made, std::uint32_t scale,
            std::uint32_t global, const Naming& naming) {
  const bool is_nvfp4 = scale != none && is_dtype(table[scale], {Dtype::f8_e4m3});
  if (scale == none || (is_nvfp4 && global == none)) {
    const std::string_view suffix = scale == none ? naming.scale : naming.global;
    refuse(made, "q.scale_missing", scale == none ? "has no scales" : "has no global scale",
           {made.name + std::string(suffix)});
    return;
  }
  const auto bits = table.claim().bits;
  if (bits && *bits != 4 && !table.claim().has_exceptions) {
    refuse(made, "plan.encoding",
           "has codes of a size that this version of loadstone does not decode",
           {table[made.data].name, table[scale].name}, fmt::format("{} bits in the config", *bits),
           "4 bits");
    return;
  }
  const Shape shape = doubled(table[made.data].shape);
  if (is_nvfp4) {
    set_decoding(table, made, "nvfp4",
                 {naming.nvfp4, {made.data, scale, global}, shape, Dtype::bf16});
  } else if (is_dtype(table[scale], {Dtype::u8, Dtype::f8_e8m0})) {
    const Shape expected = in_blocks(shape, mx_block);
    if (table[scale].shape != expected) {
      refuse(made, "q.scale_shape", "does not have one scale for each 32 values of a row",
             {table[scale].name}, table[scale].shape.text(), expected.text());
      return;
    }
    set_decoding(table, made, "mxfp4", {"fp4_block", {made.data, scale}, shape, Dtype::bf16});
  } else {
    refuse_layout(table, made);
  }
}

// Recognises compressed-tensors' two codes per byte. Skips packed integers, which have a "_shape"
// tensor.
std::optional<QuantizedTensor> recognise_packed(const TensorTable& table, std::uint32_t tensor) {
  constexpr Naming naming = {"_scale", "_global_scale", "nvfp4_divided"};
  const std::string name = without_suffix(table[tensor].name, "_packed");
  const auto scale = table.find(name + "_scale");
  const auto global = table.find(name + "_global_scale");
  if (table.find(name + "_shape") != none) return std::nullopt;
  QuantizedTensor made = quantized_tensor(name, tensor, {scale, global});
  decode(table, made, scale, global, naming);
  return made;
}

// Recognises GPT-OSS, whose model has the last two dimensions in the opposite order.
QuantizedTensor recognise_blocks(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& blocks = table[tensor];
  const std::string name = without_suffix(blocks.name, "_blocks");
  const auto scale = table.find(name + "_scales");
  QuantizedTensor made = quantized_tensor(name, tensor, {scale});
  const std::size_t rank = blocks.shape.rank();
  if (scale == none) {
    refuse(made, "q.scale_missing", "has blocks, but no scales", {name + "_scales"});
  } else if (rank < 2 || blocks.shape[rank - 1] != mxfp4_block_bytes) {
    refuse(made, "q.block", "has blocks of the wrong size", {blocks.name}, blocks.shape.text(),
           "16 bytes in each block");
  } else {
    const Shape shape = ungrouped(blocks.shape);
    set_decoding(table, made, "mxfp4", {"mxfp4", {tensor, scale}, shape, Dtype::bf16});
    made.is_transposed = shape.rank() == 3;
  }
  return made;
}

std::optional<QuantizedTensor> recognise(const TensorTable& table, std::uint32_t tensor) {
  const TensorInfo& data = table[tensor];
  if (!is_dtype(data, {Dtype::u8, Dtype::i8})) return std::nullopt;
  const std::string& name = data.name;
  if (name.ends_with("_packed")) return recognise_packed(table, tensor);
  if (!is_dtype(data, {Dtype::u8})) return std::nullopt;
  if (name.ends_with("_blocks")) return recognise_blocks(table, tensor);
  constexpr Naming naming = {"_scale", "_scale_2", "nvfp4"};
  const auto scale = table.find_any(name, {"_scale", "_weight_scale"});
  const auto global = table.find_any(name, {"_scale_2", "_weight_scale_2"});
  if (scale == none && global == none) return std::nullopt;
  QuantizedTensor made = quantized_tensor(name, tensor, {scale, global});
  decode(table, made, scale, global, naming);
  return made;
}

// ---- writing

using scaled::blocks_in;
using scaled::with_last;

std::optional<Problem> write_nvfp4(const Quantization& quantization, const Shape& shape,
                                   QuantizedLayout& form) {
  if (auto problem = scaled::begin_encoding(quantization, shape, form)) return problem;
  const std::uint64_t blocks = blocks_in(form.columns, nvfp4_block);
  form.needs_amax = true;
  form.window_elements = scaled::window_of_blocks(form, nvfp4_block);
  form.parts = {{"data", with_last(shape, 1, {blocks * nvfp4_block / 2}), Dtype::u8},
                {"scale", with_last(shape, 1, {blocks}), Dtype::f8_e4m3},
                {"scale_2", with_last(shape, 2, {}), Dtype::f32}};
  return std::nullopt;
}

std::optional<Problem> write_mxfp4(const Quantization& quantization, const Shape& shape,
                                   QuantizedLayout& form) {
  if (auto problem = scaled::begin_encoding(quantization, shape, form)) return problem;
  if (form.columns % mx_block != 0) {
    return Problem{"a row does not fill whole blocks of 32 values", shape.text(),
                   "a number of columns that is a multiple of 32"};
  }
  form.window_elements = mx_block;
  form.parts = {{"data", with_last(shape, 1, {form.columns / 2}), Dtype::u8},
                {"scale", with_last(shape, 1, {form.columns / mx_block}), Dtype::u8}};
  return std::nullopt;
}

constexpr std::array unified_names = {ComponentName{"data", "weight"},
                                      ComponentName{"scale", "weight_scale"},
                                      ComponentName{"scale_2", "weight_scale_2"}};
constexpr std::array compressed_names = {
    ComponentName{"data", "weight_packed"}, ComponentName{"scale", "weight_scale"},
    ComponentName{"scale_2", "weight_global_scale", ComponentShape::one, true}};

constexpr std::array written = {
    WrittenEncoding{
        .name = "nvfp4",
        .kind = QuantizeKind::nvfp4,
        .bits = 4,
        .code_type = "float",
        .kernel = "nvfp4",
        .prepare = write_nvfp4,
        .unified_names = unified_names,
        .compressed_names = compressed_names,
        .unified = {"W4A16_NVFP4", Described::weights, nvfp4_block, {}, false, true},
        .compressed =
            {"nvfp4-pack-quantized", "tensor_group", {}, nvfp4_block, "torch.float8_e4m3fn"},
        .typical_error = 0.0952F,
        .exported_dialect = "modelopt-compat",
        .row_block = nvfp4_block,
    },
    WrittenEncoding{
        .name = "mxfp4",
        .kind = QuantizeKind::mxfp4,
        .bits = 4,
        .code_type = "float",
        .kernel = "fp4_block",
        .prepare = write_mxfp4,
        .unified_names = std::span(unified_names).first(2),
        .compressed_names = std::span(compressed_names).first(2),
        .unified = {"mxfp4"},
        .compressed = {"mxfp4-pack-quantized", "group", {}, mx_block, "torch.uint8"},
        .typical_error = 0.1155F,
        .decodes_experts = true,
        .exported_dialect = "modelopt-compat",
        .row_block = mx_block,
    },
};

}  // namespace

constexpr std::array<std::string_view, 2> encodings = {"nvfp4", "mxfp4"};

extern const Family fp4_family = {
    .kernels = kernels, .recognise = recognise, .encodings = encodings, .written = written};

}  // namespace loadstone
