#include "kernels/decode.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "base/ceil_div.h"
#include "kernels/cast.h"
#include "kernels/number.h"

namespace loadstone {

namespace {

// As F32, on their way: they stay in the first-level cache.
constexpr std::uint64_t run_max = 1024;

constexpr std::array<float, 16> e2m1_values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,
                                               4.0f,  6.0f,  -0.0f, -0.5f, -1.0f, -1.5f,
                                               -2.0f, -3.0f, -4.0f, -6.0f};

constexpr std::uint64_t mxfp4_block_bytes = 16;

bool holds_nibbles(Dtype weight) noexcept { return weight == Dtype::u8; }

float power_of_two(std::uint8_t byte) noexcept {
  return std::bit_cast<float>(byte == 0 ? 0x00400000u : static_cast<std::uint32_t>(byte) << 23);
}

float scale_at(Dtype dtype, const std::byte* from, std::uint64_t index) noexcept {
  switch (dtype) {
    case Dtype::f32:
      return number::load<Dtype::f32>(from + 4 * index);
    case Dtype::bf16:
      return number::load<Dtype::bf16>(from + 2 * index);
    case Dtype::f16:
      return number::load<Dtype::f16>(from + 2 * index);
    case Dtype::f8_e8m0:
      return number::load<Dtype::f8_e8m0>(from + index);
    case Dtype::f8_e4m3:
      return number::load<Dtype::f8_e4m3>(from + index);
    default:
      return power_of_two(number::load_raw<std::uint8_t>(from + index));
  }
}

using Pair = std::array<float, 2>;

// The two numbers of each byte: one look-up in place of two, and no shifts.
constexpr std::array<Pair, 256> make_pairs() {
  std::array<Pair, 256> pairs = {};
  for (std::size_t byte = 0; byte < pairs.size(); ++byte) {
    pairs[byte] = {e2m1_values[byte & 0xf], e2m1_values[byte >> 4]};
  }
  return pairs;
}
constexpr std::array<Pair, 256> pairs = make_pairs();

void load_nibbles(const std::byte* weights, bool starts_high, float* values,
                  std::uint64_t count) noexcept {
  if (starts_high && count > 0) {
    *values++ = pairs[std::to_integer<std::size_t>(*weights++)][1];
    --count;
  }
  for (std::uint64_t i = 0; i < count / 2; ++i) {
    std::memcpy(values + 2 * i, &pairs[std::to_integer<std::size_t>(weights[i])], sizeof(Pair));
  }
  if (count % 2 != 0) {
    values[count - 1] = pairs[std::to_integer<std::size_t>(weights[count / 2])][0];
  }
}

// One row's numbers out of the bytes that it shares with its neighbour.
void load_row_half(const std::byte* weights, bool is_high, float* values,
                   std::uint64_t count) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) {
    const unsigned code = std::to_integer<unsigned>(weights[i]) >> (is_high ? 4 : 0) & 15u;
    values[i] = static_cast<float>(static_cast<int>(code ^ 8u) - 8);
  }
}

void load_offset_codes(const std::byte* weights, bool starts_low, float* values,
                       std::uint64_t count) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t at = i + (starts_low ? 1 : 0);
    const unsigned code = std::to_integer<unsigned>(weights[at / 2]) >> (at % 2 == 0 ? 4 : 0) & 15u;
    values[i] = static_cast<float>(static_cast<int>(code) - 8);
  }
}

void divide(float* values, std::uint64_t count, float scale) noexcept {
  for (std::uint64_t i = 0; i < count; ++i) values[i] /= scale;
}

// A NaN of the weight goes before one of the scale, on every compiler and machine.
void multiply(float* values, std::uint64_t count, float scale) noexcept {
  if (scale != scale) {
    const auto quiet = std::bit_cast<float>(std::bit_cast<std::uint32_t>(scale) | 0x00400000u);
    for (std::uint64_t i = 0; i < count; ++i) {
      if (values[i] == values[i]) values[i] = quiet;
    }
    return;
  }
  for (std::uint64_t i = 0; i < count; ++i) values[i] *= scale;
}

DecodeProblem problem(std::string message, std::string found = {}, std::string expected = {}) {
  return {std::move(message), std::move(found), std::move(expected)};
}

bool is_one_of(Encoding encoding, std::initializer_list<Dtype> dtypes) noexcept {
  return std::ranges::any_of(dtypes, [&](Dtype dtype) { return encoding == Encoding(dtype); });
}

// The last dimension, or the one so many from the end, with so many times its extent.
std::optional<Shape> widened(const Shape& shape, std::uint64_t factor, std::size_t from_end = 1) {
  auto extents = shape.extents();
  if (extents.size() < from_end) return std::nullopt;
  std::uint64_t& extent = extents[extents.size() - from_end];
  if (extent > UINT64_MAX / factor) return std::nullopt;
  extent *= factor;
  Shape wide(std::move(extents));
  if (!wide.numel()) return std::nullopt;
  return wide;
}

std::optional<DecodeProblem> check_scale_dtype(const DecodePart& scales,
                                               std::initializer_list<Dtype> dtypes,
                                               const char* expected, DecodeForm& form) {
  if (!is_one_of(scales.encoding, dtypes)) {
    return problem("scales of a dtype that the kernel does not know",
                   std::string(scales.encoding.name()), expected);
  }
  form.scale = scales.encoding.dtype();
  return std::nullopt;
}

std::optional<DecodeProblem> check_block_scales(const DecodePart& scales, DecodeForm& form) {
  return check_scale_dtype(scales, {Dtype::f32, Dtype::bf16, Dtype::f16, Dtype::f8_e8m0, Dtype::u8},
                           "F32, BF16, F16, F8_E8M0 or U8", form);
}

std::optional<DecodeProblem> prepare_blocks(const DecodePart& scales, const Shape& shape,
                                            DecodeForm& form) {
  if (auto wrong = check_block_scales(scales, form)) return wrong;
  if (shape.rank() < 2) return problem("the weights are no matrices", shape.text());
  const std::size_t rank = scales.shape.rank();
  const std::uint64_t rows = shape[shape.rank() - 2];
  form.columns = shape[shape.rank() - 1];
  form.matrix_elements = rows * form.columns;  // part of a product that fits
  const std::uint64_t scale_rows = rank < 2 ? 1 : scales.shape[rank - 2];
  form.scale_columns = rank < 2 ? 1 : scales.shape[rank - 1];
  form.scale_count = scales.shape.numel().value_or(0);
  if (form.scale_count == 0 || rows % scale_rows != 0 || form.columns % form.scale_columns != 0) {
    return problem("the weights do not fall into blocks of one scale each", scales.shape.text(),
                   "scales that divide " + shape.text());
  }
  form.block_rows = rows / scale_rows;
  form.block_columns = form.columns / form.scale_columns;
  const std::uint64_t per_matrix = scale_rows * form.scale_columns;
  const std::uint64_t matrices = form.elements / form.matrix_elements;
  const std::uint64_t scale_matrices = form.scale_count / per_matrix;
  if (scale_matrices != 1 && scale_matrices != matrices) {
    return problem("another number of matrices has scales than weights", scales.shape.text(),
                   "scales for " + shape.text());
  }
  form.matrix_scales = scale_matrices == 1 ? 0 : per_matrix;
  return std::nullopt;
}

// Scales of blocks whose size the kernel knows, the last of which may be cut: one a block of each
// matrix, or (a vector of them) one a row.
std::optional<DecodeProblem> prepare_known_blocks(const DecodePart& scales, const Shape& shape,
                                                  std::uint64_t block_rows,
                                                  std::uint64_t block_columns, DecodeForm& form) {
  if (shape.rank() < 2) return problem("the weights are no matrices", shape.text());
  const std::uint64_t rows = shape[shape.rank() - 2];
  form.columns = shape[shape.rank() - 1];
  form.matrix_elements = rows * form.columns;  // part of a product that fits
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
  const bool is_vector = form.scale_columns == 1 && scales.shape == Shape(expected);
  // ModelOpt keeps a dimension for the block beside each that blocks are counted in.
  expected.insert(expected.end(), {1, form.scale_columns, 1});
  const bool is_spread = block_rows > 1 && scales.shape == Shape(std::move(expected));
  if (is_vector || is_spread || scales.shape == whole) return std::nullopt;
  return problem("blocks and scales differ in number", scales.shape.text(), whole.text());
}

std::optional<DecodeProblem> prepare_nvfp4(std::span<const DecodePart> parts, const Shape& shape,
                                           DecodeForm& form) {
  constexpr std::uint64_t block = 16;
  if (auto wrong = prepare_known_blocks(parts[1], shape, 1, block, form)) return wrong;
  form.global_count = parts[2].shape.numel().value_or(0);
  const std::uint64_t matrices = form.elements / form.matrix_elements;
  if (!is_one_of(parts[2].encoding, {Dtype::f32})) {
    return problem("a global scale of another dtype", std::string(parts[2].encoding.name()), "F32");
  }
  if (form.global_count != 1 && form.global_count != matrices) {
    return problem("another number of global scales than matrices", parts[2].shape.text(),
                   std::to_string(matrices));
  }
  return std::nullopt;
}

std::optional<DecodeProblem> prepare_mxfp4(const DecodePart& blocks, const DecodePart& scales,
                                           DecodeForm& form) {
  if (auto wrong = check_scale_dtype(scales, {Dtype::u8}, "U8", form)) return wrong;
  auto groups = blocks.shape.extents();
  if (groups.size() < 2 || groups.back() != mxfp4_block_bytes) {
    return problem("no blocks of 16 bytes", blocks.shape.text(), "[..., groups, 16]");
  }
  groups.pop_back();
  if (scales.shape.extents() != groups) {
    return problem("blocks and scales differ in number", scales.shape.text(), Shape(groups).text());
  }
  form.by_exponent = true;
  form.matrix_elements = form.elements;
  form.block_columns = 2 * mxfp4_block_bytes;
  form.columns = groups.back() * form.block_columns;
  form.scale_columns = groups.back();
  form.scale_count = form.elements / form.block_columns;
  return std::nullopt;
}

std::optional<DecodeProblem> prepare_int4(std::string_view kernel,
                                          std::span<const DecodePart> parts, const Shape& shape,
                                          DecodeForm& form) {
  constexpr std::uint64_t block = 128;
  const bool is_flat = kernel == "int4_blocks";
  form.int4 = is_flat ? DecodeForm::Int4::blocks : DecodeForm::Int4::row_pairs;
  auto wrong = is_flat ? check_scale_dtype(parts[1], {Dtype::f32, Dtype::f16, Dtype::bf16},
                                           "F32, F16 or BF16", form)
                       : check_scale_dtype(parts[1], {Dtype::f32}, "F32", form);
  if (wrong) return wrong;
  if (shape.rank() < 2) return problem("the weights are no matrices", shape.text());
  auto expected = shape.extents();
  const std::uint64_t columns = expected.back();
  const std::uint64_t matrix = expected[expected.size() - 2] * columns;
  if ((is_flat ? matrix : columns) % block != 0) {
    return problem("the weights are no whole blocks of 128", shape.text());
  }
  expected.back() = is_flat ? 1 : columns / block;
  if (is_flat) expected[expected.size() - 2] = matrix / block;
  if (parts[1].shape != Shape(expected)) {
    return problem("blocks and scales differ in number", parts[1].shape.text(),
                   Shape(std::move(expected)).text());
  }
  form.matrix_elements = form.elements;
  form.columns = is_flat ? block : columns;
  form.block_columns = block;
  form.scale_columns = form.columns / block;
  form.scale_count = form.elements / block;
  form.matrix_scales = form.scale_count;
  return std::nullopt;
}

// The shape of the numbers, and what they are.
std::optional<DecodeProblem> prepare_weights(std::string_view kernel, const DecodePart& weights,
                                             Shape& made, DecodeForm& form) {
  const auto wrong_dtype = [&](const char* expected) {
    return problem("weights of a dtype that the kernel does not know",
                   std::string(weights.encoding.name()), expected);
  };
  std::optional<Shape> wide = weights.shape;
  if (kernel.starts_with("fp8_") || kernel == "mxfp8") {
    if (!is_one_of(weights.encoding, {Dtype::f8_e4m3, Dtype::f8_e5m2})) {
      return wrong_dtype("F8_E4M3 or F8_E5M2");
    }
    form.weight = weights.encoding.dtype();
  } else if (kernel == "int8_rows") {
    if (!is_one_of(weights.encoding, {Dtype::i8})) return wrong_dtype("I8");
    form.weight = Dtype::i8;
  } else if (kernel.starts_with("int4_")) {
    if (!is_one_of(weights.encoding, {Dtype::u8})) return wrong_dtype("U8");
    form.weight = Dtype::u8;
    wide = widened(weights.shape, 2, kernel == "int4_blocks" ? 1 : 2);
  } else if (kernel == "fp4_block" || kernel.starts_with("nvfp4")) {
    if (!is_one_of(weights.encoding, {Dtype::i8, Dtype::u8})) return wrong_dtype("I8 or U8");
    form.weight = Dtype::u8;
    wide = widened(weights.shape, 2);
  } else if (kernel == "mxfp4") {
    if (!is_one_of(weights.encoding, {Dtype::u8})) return wrong_dtype("U8");
    form.weight = Dtype::u8;
    wide = widened(weights.shape, 2);
    if (wide && wide->rank() > 1) {
      auto extents = wide->extents();
      extents[extents.size() - 2] *= extents.back();  // of a product that fits
      extents.pop_back();
      wide = Shape(std::move(extents));
    }
  }
  if (!wide) return problem("the size does not fit 64 bits", weights.shape.text());
  made = *std::move(wide);
  return std::nullopt;
}

}  // namespace

DecodeForm::Range DecodeForm::weight_bytes(std::uint64_t begin, std::uint64_t end) const noexcept {
  if (block.bytes > 0) {
    const std::uint64_t blocks_end = (end - 1) / block.elements + 1;
    return {begin / block.elements * block.bytes, blocks_end * block.bytes};
  }
  if (bnb == Bnb::rows || !holds_nibbles(weight)) return {begin, end};
  if (int4 == Int4::row_pairs) {
    const std::uint64_t first = begin / columns;
    const std::uint64_t last = (end - 1) / columns;
    const std::uint64_t bytes = first / 2 * columns;
    if (first == last) return {bytes + begin % columns, bytes + (end - 1) % columns + 1};
    return {bytes, (last / 2 + 1) * columns};
  }
  return {begin / 2, end / 2 + end % 2};
}

DecodeForm::Range DecodeForm::scale_bytes(std::uint64_t begin, std::uint64_t end) const noexcept {
  if (block.bytes > 0) return {};
  if (bnb != Bnb::none) return bnb_part_bytes(*this, 1, begin, end);
  const std::uint64_t size = element_bytes(scale);
  const std::uint64_t last = end - 1;
  if (matrix_scales == 0 && begin / matrix_elements != last / matrix_elements) {
    return {0, scale_count * size};
  }
  const auto block_row = [&](std::uint64_t element) {
    return element / matrix_elements * matrix_scales +
           element % matrix_elements / columns / block_rows * scale_columns;
  };
  std::uint64_t first_scale = block_row(begin);
  std::uint64_t end_scale = block_row(last) + scale_columns;
  if (begin / columns == last / columns) {
    end_scale = first_scale + last % columns / block_columns + 1;
    first_scale += begin % columns / block_columns;
  }
  return {first_scale * size, end_scale * size};
}

DecodeForm::Range DecodeForm::part_bytes(std::size_t part, std::uint64_t begin,
                                         std::uint64_t end) const noexcept {
  if (part == 0) return weight_bytes(begin, end);
  if (part == 1) return scale_bytes(begin, end);
  if (bnb != Bnb::none) return bnb_part_bytes(*this, part, begin, end);
  if (part > 2 || global == Global::none) return {};
  if (global_count == 1) return {0, sizeof(float)};
  return {begin / matrix_elements * sizeof(float),
          ((end - 1) / matrix_elements + 1) * sizeof(float)};
}

std::optional<DecodeProblem> prepare_decoding(std::string_view kernel,
                                              std::span<const DecodePart> parts, const Shape& shape,
                                              Dtype dtype, float offset, DecodeForm& form) {
  form = {};
  if (decodes_bnb(kernel)) return prepare_bnb(kernel, parts, shape, dtype, offset, form);
  if (offset != 0) return problem("the kernel adds nothing to scales", std::to_string(offset), "0");
  if (decodes_blocks(kernel)) {
    if (parts.size() == 1) return prepare_block_format(kernel, parts[0], shape, dtype, form);
    return problem("the kernel takes blocks", std::to_string(parts.size()) + " tensors",
                   "1 tensor");
  }
  constexpr std::array kernels = {"fp8_block", "fp8_block_128", "fp8_rows",      "mxfp8",
                                  "int8_rows", "fp4_block",     "nvfp4",         "nvfp4_divided",
                                  "mxfp4",     "int4_blocks",   "int4_row_pairs"};
  if (std::ranges::find(kernels, kernel) == kernels.end()) {
    return problem("there is no such kernel", std::string(kernel),
                   "fp8_block, nvfp4, mxfp4, bnb_nf4, gguf ...");
  }
  const bool has_global = kernel.starts_with("nvfp4");
  if (parts.size() != (has_global ? 3u : 2u)) {
    return problem(has_global ? "the kernel takes weights, scales and a global scale"
                              : "the kernel takes weights and scales",
                   std::to_string(parts.size()) + " tensors",
                   has_global ? "3 tensors" : "2 tensors");
  }
  Shape made;
  if (auto wrong = prepare_weights(kernel, parts[0], made, form)) return wrong;
  if (made != shape) {
    return problem("the kernel gives another shape", shape.text(), made.text());
  }
  if (dtype != Dtype::f32 && dtype != Dtype::bf16 && dtype != Dtype::f16) {
    return problem("the kernel does not give this dtype", std::string(name(dtype)),
                   "F32, BF16 or F16");
  }
  form.dtype = dtype;
  form.elements = shape.numel().value_or(0);
  if (form.elements == 0 || form.elements > UINT64_MAX / 8) {
    return problem("the kernel cannot decode as many elements", shape.text());
  }
  if (kernel.starts_with("int4_")) return prepare_int4(kernel, parts, shape, form);
  if (kernel == "mxfp4") return prepare_mxfp4(parts[0], parts[1], form);
  if (has_global) {
    form.global = kernel == "nvfp4" ? DecodeForm::Global::factor : DecodeForm::Global::divisor;
    if (auto wrong = check_scale_dtype(parts[1], {Dtype::f8_e4m3}, "F8_E4M3", form)) return wrong;
    return prepare_nvfp4(parts, shape, form);
  }
  if (kernel == "fp8_block" || kernel == "fp4_block") return prepare_blocks(parts[1], shape, form);
  if (auto wrong = check_block_scales(parts[1], form)) return wrong;
  if (kernel == "mxfp8") return prepare_known_blocks(parts[1], shape, 1, 32, form);
  if (kernel == "fp8_block_128") return prepare_known_blocks(parts[1], shape, 128, 128, form);
  return prepare_known_blocks(parts[1], shape, 1, 0, form);
}

void decode(const DecodeForm& form, std::uint64_t begin, std::uint64_t end,
            std::span<const std::byte* const> parts, std::byte* target) noexcept {
  const std::byte* const weights = parts[0];
  if (form.block.bytes > 0) {
    decode_block_format(form, begin, end, weights, target);
    return;
  }
  if (form.bnb != DecodeForm::Bnb::none) {
    decode_bnb(form, begin, end, parts, target);
    return;
  }
  const std::byte* const scales = parts[1];
  alignas(64) std::array<float, run_max> values;
  const std::uint64_t first_weight = form.weight_bytes(begin, end).begin;
  const std::uint64_t first_scale = form.scale_bytes(begin, end).begin / element_bytes(form.scale);
  const Cast widen = cast_between(form.weight, Dtype::f32);
  const Cast round = cast_between(Dtype::f32, form.dtype);
  const std::size_t target_bytes = element_bytes(form.dtype);
  for (std::uint64_t at = begin; at < end;) {
    const std::uint64_t column = at % form.columns;
    const std::uint64_t count = std::min({run_max, form.columns - column, end - at});
    const std::byte* const from =
        weights + (form.weight_bytes(at, at + count).begin - first_weight);
    if (form.int4 == DecodeForm::Int4::row_pairs) {
      load_row_half(from, at / form.columns % 2 != 0, values.data(), count);
    } else if (form.int4 == DecodeForm::Int4::blocks) {
      load_offset_codes(from, at % 2 != 0, values.data(), count);
    } else if (holds_nibbles(form.weight)) {
      load_nibbles(from, at % 2 != 0, values.data(), count);
    } else {
      widen.run(from, reinterpret_cast<std::byte*>(values.data()), count);
    }
    const std::uint64_t in_matrix = at % form.matrix_elements;
    const std::uint64_t row_scale = at / form.matrix_elements * form.matrix_scales +
                                    in_matrix / form.columns / form.block_rows * form.scale_columns;
    for (std::uint64_t i = 0; i < count;) {
      const std::uint64_t block = (column + i) / form.block_columns;
      const std::uint64_t run = std::min((block + 1) * form.block_columns - column - i, count - i);
      float scale = scale_at(form.scale, scales, row_scale + block - first_scale);
      if (form.global != DecodeForm::Global::none) {
        const std::uint64_t matrix =
            form.global_count == 1 ? 0 : at / form.matrix_elements - begin / form.matrix_elements;
        const float global = number::load<Dtype::f32>(parts[2] + matrix * sizeof(float));
        scale = form.global == DecodeForm::Global::factor ? scale * global : scale / global;
      }
      if (form.int4 == DecodeForm::Int4::blocks) {
        divide(values.data() + i, run, scale);
      } else if (form.by_exponent && std::isinf(scale)) {
        multiply(values.data() + i, run, 0x1p127f);
        multiply(values.data() + i, run, 2.0f);
      } else {
        multiply(values.data() + i, run, scale);
      }
      i += run;
    }
    round.run(reinterpret_cast<const std::byte*>(values.data()),
              target + (at - begin) * target_bytes, count);
    at += count;
  }
}

}  // namespace loadstone
