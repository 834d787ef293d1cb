// Which parts a value has in ModelOpt's encodings, and what is refused.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/modelopt.h"
#include "kernels/modelopt/scales.h"

namespace loadstone {

namespace {

struct Known {
  std::string_view name;
  QuantizeKind kind;
};
constexpr std::array known = {
    Known{"fp8", QuantizeKind::fp8},
    Known{"fp8-channel", QuantizeKind::fp8_channel},
    Known{"fp8-block", QuantizeKind::fp8_block},
    Known{"int8-channel", QuantizeKind::int8_channel},
    Known{"int4", QuantizeKind::int4},
    Known{"int4-awq", QuantizeKind::int4_awq},
    Known{"nvfp4", QuantizeKind::nvfp4},
    Known{"mxfp4", QuantizeKind::mxfp4},
    Known{"mxfp8", QuantizeKind::mxfp8},
};

std::optional<DecodeProblem> set_dialect(const Quantization& quantization, QuantizeForm& form) {
  const std::string& dialect = quantization.dialect;
  const bool is_fp8 = form.kind == QuantizeKind::fp8;
  if (dialect.empty() || dialect == "exact") {
    form.dialect = QuantizeDialect::exact;
  } else if (dialect == "modelopt-compat") {
    form.dialect = QuantizeDialect::compressed;
  } else if (dialect == "modelopt-export" && is_fp8) {
    form.dialect = QuantizeDialect::exported;
  } else {
    return DecodeProblem{
        "no such dialect", dialect,
        is_fp8 ? "exact, modelopt-compat or modelopt-export" : "exact or modelopt-compat"};
  }
  return std::nullopt;
}

// The shape with its last dimensions replaced: `taken` of them by `others`.
Shape with_last(const Shape& shape, std::size_t taken,
                std::initializer_list<std::uint64_t> others) {
  std::vector<std::uint64_t> extents = shape.extents();
  extents.resize(extents.size() - std::min(taken, extents.size()));
  extents.insert(extents.end(), others.begin(), others.end());
  return Shape(std::move(extents));
}

// Scales of the numbers' dtype where ModelOpt has them.
Dtype scale_dtype(const QuantizeForm& form) {
  return form.dialect == QuantizeDialect::compressed ? form.dtype : Dtype::f32;
}

// Rows whose blocks are all whole can be cut between them.
std::uint64_t window_of_blocks(const QuantizeForm& form, std::uint64_t block) {
  return form.columns % block == 0 ? block : form.columns;
}

void set_bytes(const Shape& shape, QuantizeForm& form) {
  const Dtype scale = scale_dtype(form);
  Shape scales = with_last(shape, 2, {});
  switch (form.kind) {
    case QuantizeKind::fp8:
      form.needs_amax = true;
      break;
    case QuantizeKind::fp8_channel:
      form.window_elements = form.columns;
      scales = with_last(shape, 1, {});
      break;
    case QuantizeKind::int8_channel:
      form.window_elements = form.columns;
      form.parts = {{"data", shape, Dtype::i8}, {"scale", with_last(shape, 1, {1}), scale}};
      return;
    default: {
      const std::uint64_t block = scaled::fp8_block;
      const bool is_cut = form.rows % block == 0 || form.stack == 1;
      form.window_elements = (is_cut ? std::min(form.rows, block) : form.rows) * form.columns;
      scales = with_last(
          shape, 2, {scaled::blocks_in(form.rows, block), scaled::blocks_in(form.columns, block)});
      break;
    }
  }
  form.parts = {{"data", shape, Dtype::f8_e4m3}, {"scale", scales, scale}};
}

void set_parts(const Shape& shape, QuantizeForm& form) {
  const std::uint64_t columns = form.columns;
  const Shape halves = with_last(shape, 1, {columns / 2});
  switch (form.kind) {
    case QuantizeKind::int4: {
      const std::uint64_t blocks = form.matrix_elements() / scaled::int4_block;
      form.window_elements = scaled::int4_block;
      form.parts = {{"data", halves, Dtype::u8},
                    {"scale", with_last(shape, 2, {blocks, 1}), scale_dtype(form)}};
      return;
    }
    case QuantizeKind::int4_awq:
      form.window_elements = 2 * columns;
      form.parts = {{"data", with_last(shape, 2, {form.rows / 2, columns}), Dtype::u8},
                    {"scale", with_last(shape, 1, {columns / scaled::int4_block}), Dtype::f32}};
      return;
    case QuantizeKind::nvfp4: {
      const std::uint64_t blocks = scaled::blocks_in(columns, scaled::nvfp4_block);
      form.needs_amax = true;
      form.window_elements = window_of_blocks(form, scaled::nvfp4_block);
      form.parts = {{"data", with_last(shape, 1, {blocks * 8}), Dtype::u8},
                    {"scale", with_last(shape, 1, {blocks}), Dtype::f8_e4m3},
                    {"scale_2", with_last(shape, 2, {}), Dtype::f32}};
      return;
    }
    case QuantizeKind::mxfp4:
    case QuantizeKind::mxfp8: {
      const std::uint64_t blocks = scaled::blocks_in(columns, simd::mx_block);
      const bool is_mxfp4 = form.kind == QuantizeKind::mxfp4;
      form.window_elements = window_of_blocks(form, simd::mx_block);
      form.parts = {{"data", is_mxfp4 ? halves : shape, is_mxfp4 ? Dtype::u8 : Dtype::f8_e4m3},
                    {"scale", with_last(shape, 1, {blocks}), Dtype::u8}};
      return;
    }
    default:
      return set_bytes(shape, form);
  }
}

// Tails of blocks: where ModelOpt has no bytes for them.
std::optional<DecodeProblem> check_shape(const Shape& shape, const QuantizeForm& form) {
  const auto refuse = [&](std::string message, std::string expected) {
    return DecodeProblem{std::move(message), shape.text(), std::move(expected)};
  };
  switch (form.kind) {
    case QuantizeKind::fp8_channel:
    case QuantizeKind::fp8_block:
    case QuantizeKind::int8_channel:
      if (shape.rank() < 2) return refuse("it takes matrices", "[..., rows, columns]");
      return std::nullopt;
    case QuantizeKind::int4:
      if (form.matrix_elements() % scaled::int4_block != 0 || form.columns % 2 != 0) {
        return refuse("a matrix is no whole blocks of 128 numbers",
                      "an even number of columns, and rows * columns a multiple of 128");
      }
      return std::nullopt;
    case QuantizeKind::int4_awq:
      if (shape.rank() < 2 || form.columns % scaled::int4_block != 0 || form.rows % 2 != 0) {
        return refuse("a matrix is no whole pairs of rows of blocks of 128 numbers",
                      "an even number of rows, and columns a multiple of 128");
      }
      return std::nullopt;
    case QuantizeKind::mxfp4:
      if (form.columns % simd::mx_block != 0) {
        return refuse("a row is no whole blocks of 32 numbers", "columns a multiple of 32");
      }
      return std::nullopt;
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<QuantizeKind> scaled_kind(std::string_view encoding) noexcept {
  const auto* const found = std::ranges::find(known, encoding, &Known::name);
  if (found == known.end()) return std::nullopt;
  return found->kind;
}

std::string scaled_names() {
  std::string names;
  for (const Known& one : known) names += (names.empty() ? "" : ", ") + std::string(one.name);
  return names;
}

std::optional<DecodeProblem> prepare_scaled(const Quantization& quantization, const Shape& shape,
                                            QuantizeForm& form) {
  if (auto problem = set_dialect(quantization, form)) return problem;
  if (quantization.nested) {
    return DecodeProblem{quantization.encoding + " has no nested scales", {}, {}};
  }
  if (shape.rank() == 0 || form.elements == 0) {
    return DecodeProblem{"there are no rows to scale", shape.text(), "[..., rows, columns]"};
  }
  form.columns = shape[shape.rank() - 1];
  form.rows = shape.rank() > 1 ? shape[shape.rank() - 2] : 1;
  form.stack = form.elements / form.rows / form.columns;
  if (auto problem = check_shape(shape, form)) return problem;
  set_parts(shape, form);
  for (const QuantizedPart& part : form.parts) {
    const auto count = part.shape.numel();
    if (!count || !Encoding(part.dtype).byte_count(*count)) {
      return DecodeProblem{"the size does not fit 64 bits", shape.text(), {}};
    }
  }
  return std::nullopt;
}

}  // namespace loadstone
